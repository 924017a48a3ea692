"""Rotary embeddings that differ only in how the cos/sin cache is computed."""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import rotary_embedding as upstream
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

# Each overrides how the cache is computed and inherits the rotation from RotaryEmbedding.
_CACHED = (
    "RotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


class CachedRotation:
    """Rotates with the op contract, from the cache that the other base class computes."""

    def forward_oot(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates query and key [num_tokens, heads * head_size] in place. positions: int64 [num_tokens]."""
        cache = self._match_cos_sin_cache_dtype(query)
        torch.ops.kunlun.rotary_embedding(positions.flatten(), query, key, self.head_size, cache, self.is_neox_style)
        return query, key


def _classes() -> list[type[RotaryEmbedding]]:
    return [getattr(upstream, name) for name in _CACHED if hasattr(upstream, name)]


def register() -> None:
    """Registers one subclass per cached rotary embedding with vLLM."""
    for base in _classes():
        assert base.forward_native is RotaryEmbedding.forward_native, f"{base.__name__} rotates in its own way"
        CustomOp.register_oot(type(f"Kunlun{base.__name__}", (CachedRotation, base), {}), name=base.__name__)
