"""Model runner of the host target: vLLM's, with host and device buffers shared and the plugin's layers in place."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_kunlun import layers
from vllm_kunlun.graph.host_graph import CannotCapture, HostGraphWrapper
from vllm_kunlun.sampling import build_sampler, use_min_p_op
from vllm_kunlun.targets.host import weights
from vllm_kunlun.targets.host.memory import zeros_on_demand

logger = logging.getLogger("vllm.kunlun")


def _share(holder: Any) -> None:
    """Makes the "device" half of each buffer the host half: on this target a copy between them moves nothing."""
    for value in vars(holder).values():
        if isinstance(value, CpuGpuBuffer):
            value.gpu = value.cpu


class HostModelRunner(GPUModelRunner):
    """Runs one rank's model on the CPU."""

    model: nn.Module | HostGraphWrapper

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.sampler = build_sampler(self.model_config.logprobs_mode)
        use_min_p_op(self.input_batch.logitsprocs, vllm_config, device)
        _share(self)
        self._share_input_batch()

    def _share_input_batch(self) -> None:
        for table in self.input_batch.block_table.block_tables:
            _share(table)

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        """Buffers of an input batch that was made again for the resolved block sizes are shared again."""
        super().may_reinitialize_input_batch(*args, **kwargs)
        self._share_input_batch()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model as vLLM does, gathers its weights, then hands its layers to the op contract."""
        super().load_model(*args, **kwargs)
        model = self.get_model()
        weights.gather(model)
        layers.use_ops(model)
        graphs = isinstance(self.model, CUDAGraphWrapper)
        self.model = HostGraphWrapper(model, self.vllm_config) if graphs else model

    def capture_model(self) -> int:
        """Captures the smallest step, to find out whether this model's steps can be; others follow when they come.

        Returns the bytes of the graphs' memory. A model that cannot be captured runs eagerly, and the log says why.
        """
        for mode, batches in self.cudagraph_dispatcher.get_capture_descs():
            smallest = batches[-1]
            try:
                self._dummy_run(smallest.num_tokens, mode, uniform_decode=smallest.uniform, is_graph_capturing=True)
            except CannotCapture as error:
                self._run_eagerly(error)
        return self.model.memory() if isinstance(self.model, HostGraphWrapper) else 0

    def _run_eagerly(self, reason: Exception) -> None:
        logger.warning("Graph mode %s was resolved to NONE: %s", self.compilation_config.cudagraph_mode.name, reason)
        self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
        self.model = self.get_model()

    def _allocate_kv_cache_tensors(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """One zeroed int8 tensor per KV cache tensor, by layer name; tensors packed into one backing share it."""
        entries = kv_cache_config.kv_cache_tensors
        packed = [entry for entry in entries if entry.block_stride > 0]
        backing = zeros_on_demand(packed[0].size) if packed else None
        allocated: dict[str, torch.Tensor] = {}
        for entry in entries:
            tensor = backing if entry.block_stride > 0 else zeros_on_demand(entry.size)
            allocated.update(dict.fromkeys(entry.shared_by, tensor))
        return allocated

    def _init_device_properties(self) -> None:
        self.num_sms = 1

    def _init_kv_zero_meta(self) -> None:
        """Nothing to precompute: blocks are zeroed through the tensors themselves."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        for group in self._kv_cache_spec_attn_group_iterator():
            if isinstance(group.kv_cache_spec, AttentionSpec):
                self._zero_blocks(group.layer_names, ids)

    def _zero_blocks(self, layer_names: list[str], block_ids: torch.Tensor) -> None:
        for name in layer_names:
            cache = self.compilation_config.static_forward_context[name].kv_cache
            torch.ops.kunlun.zero_blocks(cache, block_ids)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        return sampled_token_ids.tolist()
