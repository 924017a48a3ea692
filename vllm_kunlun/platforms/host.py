"""The platform of the host target: a plain x86 CPU."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from vllm_kunlun.platforms import host_policy
from vllm_kunlun.platforms.kunlun import KunlunPlatform
from vllm_kunlun.targets.host import memory, threads
from vllm_kunlun.targets.host.profile import HOST
from vllm_kunlun.targets.profile import Profile
from vllm_kunlun.upstream import patches

# GPUs of this machine are not ours to use. Hidden before vLLM looks for Triton drivers: with none active vLLM uses no
# Triton kernel, whether or not a triton package is installed.
for _variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
    os.environ[_variable] = "-1"


class HostPlatform(KunlunPlatform):
    """Kernels of our own on the CPU."""

    profile: ClassVar[Profile] = HOST
    default_rules = host_policy.DEFAULTS
    rules = host_policy.RULES

    @classmethod
    def prepare_process(cls) -> None:
        """The engine's process calls torch.accelerator at its end although its workers are processes of their own."""
        patches.apply_torch_patches()

    @classmethod
    def attention_backend(cls) -> type[Any]:
        """Paged attention by the C++ kernels."""
        from vllm_kunlun.attention.host import HostAttentionBackend

        return HostAttentionBackend

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Usable bytes, control group limits respected."""
        return memory.read().total

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Resident bytes of this process."""
        return float(memory.resident())

    @classmethod
    def device_count(cls) -> int:
        """Ranks that fit: a worker needs a CPU of its own."""
        return len(threads.usable_cpus())

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """CPUs this process may use."""
        return len(threads.usable_cpus())

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one CPU device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """torch's CPU generator is seeded by vLLM itself."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No: nothing is copied to a device."""
        return False

    def graph_pool_handle(self) -> Any:
        """Graphs of the host target have memory of their own."""
        return None

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA products, grouped by adapter."""
        return "vllm_kunlun.lora.host_punica.HostPunicaWrapper"
