"""What attention layers do between the projection of query, key and value and attention itself, in one op."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from vllm_kunlun.layers.norm import KunlunRMSNorm
from vllm_kunlun.layers.rotary import CachedRotation

# In vllm.model_executor.models; their forward normalises the heads of query and key and rotates them, and does nothing
# else beside. By name, because models are slow to import.
_NORMALISING = ("qwen3.Qwen3Attention", "qwen3_moe.Qwen3MoeAttention")


def _split_norm_rope(layer: Any, positions: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim], split into three; positions: int64 [num_tokens]."""
    widths = (layer.q_size, layer.kv_size, layer.kv_size)
    parts = tuple(torch.empty((qkv.shape[0], width), dtype=qkv.dtype, device=qkv.device) for width in widths)
    rotation, norm = layer.rotary_emb, layer.q_norm
    torch.ops.kunlun.split_norm_rope(
        *parts,
        qkv,
        positions,
        rotation._match_cos_sin_cache_dtype(qkv),
        norm.weight,
        layer.k_norm.weight,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        norm.variance_epsilon,
        0.0,
        rotation.is_neox_style,
    )
    return parts


def _forward(layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """As the layer's own forward. hidden_states: [num_tokens, hidden_size]."""
    qkv, _ = layer.qkv_proj(hidden_states)
    attended = layer.attn(*_split_norm_rope(layer, positions, qkv))
    output, _ = layer.o_proj(attended)
    return output


def _fits(layer: nn.Module) -> bool:
    name = f"{type(layer).__module__}.{type(layer).__qualname__}".removeprefix("vllm.model_executor.models.")
    return (
        name in _NORMALISING
        and isinstance(layer.rotary_emb, CachedRotation)
        and all(isinstance(norm, KunlunRMSNorm) and norm.is_plain() for norm in (layer.q_norm, layer.k_norm))
    )


def use_ops(model: nn.Module) -> None:
    """Gives those layers of `model` the fused op; others keep their forward."""
    for module in model.modules():
        if _fits(module):
            module.forward = MethodType(_forward, module)
