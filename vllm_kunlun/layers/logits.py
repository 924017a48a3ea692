"""The language model head."""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding


class KunlunLogitsProcessor(LogitsProcessor):
    """Logits in float32 straight from the product: nothing is rounded to the model's dtype on the way."""

    def _get_logits(
        self, hidden_states: torch.Tensor, lm_head: VocabParallelEmbedding, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod):
            return super()._get_logits(hidden_states, lm_head, embedding_bias)
        weight = lm_head.weight
        logits = torch.empty((hidden_states.shape[0], weight.shape[0]), dtype=torch.float32, device=weight.device)
        torch.ops.kunlun.logits(logits, hidden_states, weight, embedding_bias)
        gathered = self._gather_logits(logits)
        return None if gathered is None else gathered[..., : self.org_vocab_size]


def register() -> None:
    """Registers it with vLLM."""
    PluggableLayer.register_oot(KunlunLogitsProcessor, name="LogitsProcessor")
