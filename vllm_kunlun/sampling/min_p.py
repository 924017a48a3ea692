"""The min-p filter."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor


class KunlunMinPLogitsProcessor(MinPLogitsProcessor):
    """Keeps vLLM's bookkeeping; the filter compares logits with a bound instead of making a softmax of them."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Filters logits, float32 [B, V], in place."""
        if self.min_p_count:
            torch.ops.kunlun.min_p(logits, self.min_p.squeeze(1))
        return logits


def use_min_p_op(processors: LogitsProcessors, vllm_config: VllmConfig, device: torch.device) -> None:
    """Puts KunlunMinPLogitsProcessor in the place of vLLM's own, which must not have seen a request yet."""
    chain = processors.argmax_invariant
    for place, processor in enumerate(chain):
        if type(processor) is MinPLogitsProcessor:
            chain[place] = KunlunMinPLogitsProcessor(vllm_config, device, is_pin_memory=False)
