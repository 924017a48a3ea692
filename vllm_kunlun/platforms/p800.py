"""The platform of the p800 target: xpytorch shows the card as a CUDA device, so torch.cuda is its driver."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from vllm_kunlun.platforms import p800_policy
from vllm_kunlun.platforms.kunlun import KunlunPlatform
from vllm_kunlun.platforms.start_error import StartError
from vllm_kunlun.targets.p800 import environment
from vllm_kunlun.targets.p800.profile import P800
from vllm_kunlun.targets.profile import Profile
from vllm_kunlun.upstream import patches


class P800Platform(KunlunPlatform):
    """The vendor's kernels on the card."""

    profile: ClassVar[Profile] = P800
    default_rules = p800_policy.DEFAULTS
    rules = p800_policy.RULES
    ray_device_key = "GPU"

    def __init__(self) -> None:
        """Created by vLLM in every process, before it looks for Triton drivers. Raises StartError.

        An exception of the entry point, which sets the vendor's variables, would be ignored.
        """
        problem = environment.problem(os.environ)
        if problem is not None:
            raise StartError(f"vllm-kunlun: {problem}")
        patches.hide_triton_drivers()

    @classmethod
    def prepare_process(cls) -> None:
        """Functions of torch that vLLM calls and the vendor's torch is too old for."""
        patches.fill_torch_gaps()

    @classmethod
    def attention_backend(cls) -> type[Any]:
        """Paged attention by the vendor's kernels."""
        from vllm_kunlun.attention.p800 import P800AttentionBackend

        return P800AttentionBackend

    @classmethod
    def device_of(cls, index: int) -> torch.device:
        """The torch device of the visible card `index`."""
        return torch.device(cls.profile.torch_device, index)

    @classmethod
    def host_buffer(cls, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [size] in host memory, for numbers that kernels read there."""
        return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=cls.is_pin_memory_available())

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of the card."""
        return int(torch.cuda.get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes that torch's allocator has given out on the card."""
        return float(torch.cuda.memory_allocated(device))

    @classmethod
    def device_count(cls) -> int:
        """Cards this process may use."""
        return int(torch.cuda.device_count())

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """The card's clusters."""
        return int(torch.cuda.get_device_properties(device_id).multi_processor_count)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Makes a card this thread's own."""
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds the generators of all cards."""
        torch.cuda.manual_seed_all(seed)

    def current_stream(self) -> Any:
        """This thread's stream."""
        return torch.cuda.current_stream()

    def graph_pool_handle(self) -> Any:
        """A memory pool that graphs share."""
        return torch.cuda.graph_pool_handle()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Yes: copies from pinned memory run beside the kernels."""
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """vLLM's own wrapper over torch.cuda.CUDAGraph."""
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Collectives of torch.distributed only."""
        return "vllm_kunlun.distributed.communicator.P800Communicator"
