"""Rotary embedding: kunlun_ops.rotary_embedding, and kunlun_ops.split_norm_rope_neox for all of a layer's head work.

The first rotates whole heads, in place, with a table of the query's dtype. Models that rotate a part of each head are
reported to crash in it, so that part is copied out and rotated as if it were a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.dense import dense, settle
from vllm_kunlun.ops.providers.p800.norm import shifted
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor
from vllm_kunlun.targets.p800.contract_load import load

_ROTATE = "kunlun_ops.rotary_embedding"
_FUSED = "kunlun_ops.split_norm_rope_neox"


def _turned_part(heads: Tensor, head_size: int, rotary_dim: int) -> Tensor:
    """View of the elements that turn, [T, H, rotary_dim], of [T, H·D] or [T, H, D]."""
    split = heads if heads.dim() == 3 else heads.unflatten(-1, (heads.size(-1) // head_size, head_size))
    return split[..., :rotary_dim]


def rotary_embedding(vendor: Vendor) -> Implementation:
    """The op `rotary_embedding`."""
    rotate = vendor.function(_ROTATE)

    def run(
        positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
    ) -> None:
        rotary_dim, tokens = cos_sin_cache.size(1), positions.size(0)
        views = [_turned_part(x, head_size, rotary_dim) for x in (query, key) if x is not None]
        parts = [view.contiguous() for view in views]
        flat = [part.view(tokens, -1) for part in parts]
        if key is None:  # the kernel takes no call without keys
            flat.append(query.new_empty(tokens, rotary_dim))
        rows, table = _table(positions, cos_sin_cache, query.dtype)
        rotate(rows, *flat, rotary_dim, table, is_neox)
        for view, part in zip(views, parts, strict=True):
            settle(view, part)

    return run


def _table(positions: Tensor, cos_sin_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions and table for a query of `dtype`: of another type's table only the rows that are needed are cast."""
    if cos_sin_cache.dtype == dtype:
        return positions.contiguous(), cos_sin_cache.contiguous()
    rows = cos_sin_cache.index_select(0, positions).to(dtype)
    return torch.arange(positions.size(0), device=positions.device), rows


def split_norm_rope(vendor: Vendor) -> Implementation:
    """The op `split_norm_rope`: one launch where the fused kernel serves it, otherwise split, norms and rotation."""
    fused, apart = vendor.function(_FUSED), _apart(vendor)
    epsilon_of_kernel = load().op(_FUSED).fixed["epsilon"]

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        qkv: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        epsilon: float,
        weight_offset: float,
        is_neox: bool,
    ) -> None:
        outs = [dense(out) for out in (query, key, value)]
        rotary_dim, whole = cos_sin_cache.size(1), cos_sin_cache.size(1) == head_size
        if is_neox and whole and epsilon == epsilon_of_kernel and q_weight is not None and k_weight is not None:
            weights = [shifted(weight, weight_offset) for weight in (q_weight, k_weight)]
            fused(
                *outs, qkv.contiguous(), cos_sin_cache.contiguous(), *weights, positions.contiguous(), qkv.size(0),
                cos_sin_cache.size(0), num_heads, num_kv_heads, head_size, rotary_dim,
            )  # fmt: skip
        else:
            _split(outs, qkv)
            norms = [None if w is None else shifted(w, weight_offset) for w in (q_weight, k_weight)]
            apart(outs, norms, positions, cos_sin_cache, head_size, epsilon, is_neox)
        for out, written in zip((query, key, value), outs, strict=True):
            settle(out, written)

    return run


def _split(outs: list[Tensor], qkv: Tensor) -> None:
    for out, part in zip(outs, qkv.split([out.size(-1) for out in outs], dim=-1), strict=True):
        out.copy_(part)


def _apart(vendor: Vendor) -> Implementation:
    """Norms of the heads in place, where there are weights, then the rotation."""
    rmsnorm, rotate = vendor.function("kunlun_ops.rmsnorm"), rotary_embedding(vendor)

    def run(
        outs: list[Tensor],
        weights: list[Tensor | None],
        positions: Tensor,
        cos_sin_cache: Tensor,
        head_size: int,
        epsilon: float,
        is_neox: bool,
    ) -> None:
        query, key, _ = outs
        for out, weight in zip((query, key), weights, strict=True):
            heads = out.view(-1, head_size)
            if weight is not None:
                rmsnorm(heads, weight, heads, epsilon)
        rotate(positions, query, key, head_size, cos_sin_cache, is_neox)

    return run
