"""Rotary position embedding (Su et al., 2021), alone and fused with the split of qkv and the norm of q and k.

The angles come from a cache of which row p holds the cosines, then the sines, of the rotary_dim / 2 angles of position
p. Every scaling of the frequencies (linear, Llama 3, YaRN with its magnitude factor) is a matter of the cache's
content.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define


def _heads(x: Tensor, head_size: int) -> Tensor:
    return x if x.dim() == 3 else x.unflatten(-1, (x.size(-1) // head_size, head_size))


def _rotate(heads: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> None:
    rotary_dim = cos_sin_cache.size(1)
    cos, sin = cos_sin_cache.float()[positions].unsqueeze(1).chunk(2, dim=-1)
    x = heads[..., :rotary_dim].float()
    first, second = x.chunk(2, dim=-1) if is_neox else (x[..., ::2], x[..., 1::2])
    parts = (first * cos - second * sin, second * cos + first * sin)
    heads[..., :rotary_dim] = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)


def _rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    _rotate(_heads(query, head_size), positions, cos_sin_cache, is_neox)
    if key is not None:
        _rotate(_heads(key, head_size), positions, cos_sin_cache, is_neox)


def _norm(heads: Tensor, weight: Tensor | None, epsilon: float, weight_offset: float) -> Tensor:
    if weight is None:
        return heads
    scaled = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon)
    return scaled * (weight.float() + weight_offset)


def _split_norm_rope(
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
    q, k, v = _heads(qkv.float(), head_size).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = (_norm(x, w, epsilon, weight_offset).clone() for x, w in ((q, q_weight), (k, k_weight)))
    _rotary_embedding(positions, q, k, head_size, cos_sin_cache, is_neox)
    for out, x in ((query, q), (key, k), (value, v)):
        _heads(out, head_size).copy_(x)


_MAX_POSITION = 300
# (tokens, heads, kv heads, head size, rotary dim): sizes that do and do not fill vectors, partial rotation, no tokens.
_SHAPES = (
    (1, 9, 3, 64, 64),
    (0, 2, 1, 64, 64),
    (37, 3, 1, 80, 80),
    (5, 4, 2, 128, 64),
    (130, 2, 2, 40, 24),
    (2, 2, 1, 512, 512),
    (3, 1, 1, 2, 2),
)


def _cache(rotary_dim: int, dtype: torch.dtype) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(_MAX_POSITION), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def _positions(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randint(_MAX_POSITION, (tokens,), generator=generator)


def _rotary_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, kv_heads, head_size, rotary_dim in _SHAPES:
        for is_neox in (True, False):
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size, generator=generator).to(dtype)
            args = {
                "positions": _positions(tokens, generator),
                "query": qkv[:, : heads * head_size],
                "key": qkv[:, heads * head_size : -kv_heads * head_size],
                "head_size": head_size,
                "cos_sin_cache": _cache(rotary_dim, dtype),
                "is_neox": is_neox,
            }
            name = f"{tokens}x{heads}+{kv_heads}x{head_size} rotary {rotary_dim} neox={is_neox}"
            yield Case(name, dtype, args)
            yield Case(f"{name} no key", dtype, {**args, "key": None})
            yield Case(f"{name} float32 cache", dtype, {**args, "cos_sin_cache": _cache(rotary_dim, torch.float32)})
            query = torch.randn(tokens, heads + 1, head_size, generator=generator).to(dtype)[:, 1:]
            yield Case(f"{name} 3d", dtype, {**args, "query": query})


def _split_outputs(tokens: int, widths: tuple[int, int, int], dtype: torch.dtype, pad: int) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    return {
        name: torch.full((tokens, width + pad), float("nan"), dtype=dtype)[:, :width]
        for name, width in zip(names, widths, strict=True)
    }


def _split_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, kv_heads, head_size, rotary_dim in _SHAPES:
        for is_neox, norm, pad in ((True, True, 0), (False, True, 8), (True, False, 8), (False, False, 0)):
            widths = (heads * head_size, kv_heads * head_size, kv_heads * head_size)
            weights = torch.randn(2, head_size, generator=generator).to(torch.float32 if pad else dtype)
            yield Case(
                f"{tokens}x{heads}+{kv_heads}x{head_size} rotary {rotary_dim} neox={is_neox} norm={norm} pad={pad}",
                dtype,
                {
                    **_split_outputs(tokens, widths, dtype, pad),
                    "qkv": torch.randn(tokens, sum(widths) + pad, generator=generator).to(dtype)[:, : sum(widths)],
                    "positions": _positions(tokens, generator),
                    "cos_sin_cache": _cache(rotary_dim, torch.float32 if pad else dtype),
                    "q_weight": weights[0] if norm else None,
                    "k_weight": weights[1] if norm else None,
                    "num_heads": heads,
                    "num_kv_heads": kv_heads,
                    "head_size": head_size,
                    "epsilon": 1e-6,
                    "weight_offset": 1.0 if pad else 0.0,
                    "is_neox": is_neox,
                },
            )


ROTARY_EMBEDDING = define(
    Op(
        name="rotary_embedding",
        schema="(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache,"
        " bool is_neox) -> ()",
        reference=_rotary_embedding,
        cases=_rotary_cases,
    )
)
"""Rotates query and key in place.

``positions``: int64 [T], each a row of ``cos_sin_cache``; ``query``, ``key``: [T, H·D] or [T, H, D], token and head
strides free; ``cos_sin_cache``: [P, rotary_dim], the query's dtype or float32, rotary_dim ≤ D: the elements of a head
beyond rotary_dim stay as they are. ``is_neox`` pairs element i with i + rotary_dim / 2, otherwise 2i with 2i + 1.
A position outside the cache is an error.
"""

SPLIT_NORM_ROPE = define(
    Op(
        name="split_norm_rope",
        schema="(Tensor(a!) query, Tensor(b!) key, Tensor(c!) value, Tensor qkv, Tensor positions,"
        " Tensor cos_sin_cache, Tensor? q_weight, Tensor? k_weight, int num_heads, int num_kv_heads, int head_size,"
        " float epsilon, float weight_offset, bool is_neox) -> ()",
        reference=_split_norm_rope,
        cases=_split_cases,
    )
)
"""Splits qkv [T, (Hq + 2Hk)·D] into query [T, Hq·D], key and value [T, Hk·D], with an RMS norm over each head of
query and key where their weights ([D], qkv's dtype or float32, plus ``weight_offset``) are given, then rotation."""
