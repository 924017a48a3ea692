"""Model runner of the targets p800 and emulated: vLLM's, with the plugin's layers and sampler in place."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_kunlun import layers
from vllm_kunlun.sampling import build_sampler, use_min_p_op
from vllm_kunlun.upstream.patches import apply_grammar_patch


class P800ModelRunner(GPUModelRunner):
    """Runs one rank's model on its card; graphs are vLLM's own."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # The hardware has no float64.
        self.sampler = build_sampler(self.model_config.logprobs_mode, torch.float32)
        use_min_p_op(self.input_batch.logitsprocs, vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model as vLLM does, then hands its layers to the op contract."""
        super().load_model(*args, **kwargs)
        layers.use_ops(self.get_model())

    def capture_model(self) -> int:
        """Captures every size of the graph mode; returns the bytes of the card that the graphs take."""
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        return super().capture_model()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; where a request's tokens must follow a grammar, the others are masked by torch."""
        if grammar_output is not None:
            apply_grammar_patch()
        return super().sample_tokens(grammar_output)

    def _init_kv_zero_meta(self) -> None:
        """Nothing to precompute: blocks are zeroed through the tensors themselves."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self.device, non_blocking=True)
        for group in self._kv_cache_spec_attn_group_iterator():
            if isinstance(group.kv_cache_spec, AttentionSpec):
                self._zero_blocks(group.layer_names, ids)

    def _zero_blocks(self, layer_names: list[str], block_ids: torch.Tensor) -> None:
        for name in layer_names:
            cache = self.compilation_config.static_forward_context[name].kv_cache
            torch.ops.kunlun.zero_blocks(cache.transpose(0, 1), block_ids)
