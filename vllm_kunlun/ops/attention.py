"""Attention over the paged cache (decode, prefill and everything between) and over packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from vllm_kunlun.ops.attention_cases import paged_cases, varlen_cases
from vllm_kunlun.ops.contract import Op, define


def _logits(query: Tensor, key: Tensor, scale: float, softcap: float) -> Tensor:
    """[heads, queries, keys] float32, each KV head serving as many query heads as there are to one."""
    key = key.float().repeat_interleave(query.size(1) // key.size(1), dim=1)
    logits = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


def _weights(logits: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the seen keys and the head's sink, without the sink's share; 0 where nothing is seen."""
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, logits.size(1), 1)
        return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    return logits.softmax(-1).where(seen.any(-1, keepdim=True), 0.0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """One sequence: query [n, H, D], key and value [m, Hk, D]; the last query stands at the last key's position."""
    n, m = query.size(0), key.size(0)
    positions = torch.arange(m - n, m, device=query.device)
    distance = torch.arange(m, device=query.device) - positions[:, None]
    logits = _logits(query, key, scale, softcap)
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.float().view(-1, 1, 1) * distance
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    value = value.float().repeat_interleave(query.size(1) // value.size(1), dim=1)
    return torch.einsum("hqk,khd->qhd", _weights(logits, seen, sinks), value)


def _paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
) -> None:
    out.zero_()
    starts, block_size = query_start_loc.tolist(), key_cache.size(2)
    window = (window_left, 0 if causal else -1)
    for request, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        length = int(seq_lens[request])
        blocks = block_table[request, : -(-length // block_size)].long()
        key, value = (c[blocks].transpose(1, 2).flatten(0, 1)[:length] for c in (key_cache, value_cache))
        out[begin:end] = _attend(query[begin:end], key, value, scale, window, softcap, alibi_slopes, sinks)


def _varlen_attention(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    query_start_loc_cpu: Tensor | None = None,
    key_start_loc_cpu: Tensor | None = None,
) -> None:
    out.zero_()
    starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    window = (window_left, 0 if causal else window_right)
    for request, (begin, end) in enumerate(pairwise(starts)):
        keys = slice(key_starts[request], key_starts[request + 1])
        out[begin:end] = _attend(query[begin:end], key[keys], value[keys], scale, window, softcap, alibi_slopes, sinks)


PAGED_ATTENTION = define(
    Op(
        name="paged_attention",
        schema="(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,"
        " Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, int window_left, float softcap,"
        " Tensor? alibi_slopes, Tensor? sinks, Tensor? query_start_loc_cpu=None, Tensor? seq_lens_cpu=None) -> ()",
        reference=_paged_attention,
        cases=paged_cases,
    )
)
"""softmax(softcap · tanh(query · keyᵀ · scale / softcap) + alibi) · value, for keys that lie in the paged cache.

``out``, ``query``: [T, H, D]; request r owns rows query_start_loc[r] to query_start_loc[r + 1], rows after the last
one are set to zero. ``key_cache``, ``value_cache``: [num_blocks, Hk, block_size, D], any strides but the last
contiguous, H a multiple of Hk. ``block_table``: int32 [≥ B, max_blocks], read only as far as ``seq_lens`` says.
``query_start_loc``: int32 [B + 1]. ``seq_lens``: int32 [≥ B], the keys of each request, those of this step's queries
included and already written. The last query stands at position seq_lens - 1. ``causal``: a query sees no later key.
``window_left``: a query at p sees keys from p - window_left on, -1 for all. ``softcap``: 0 for none.
``alibi_slopes``: [H], slope · (key position - p) is added (Press et al., 2021). ``sinks``: [H], a logit that only adds
to the denominator. A query that sees no key gives 0. Raises on a sequence longer than its row of the block table, on a
block id outside the cache, and on mixed types.

``query_start_loc_cpu``, ``seq_lens_cpu``: the same numbers in host memory. Whoever builds a step's metadata has them
there first; a provider whose kernels want both (the P800's) then needs no copy from the device in a step. It refuses a
call without them; the others ignore them.
"""

VARLEN_ATTENTION = define(
    Op(
        name="varlen_attention",
        schema="(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor key_start_loc,"
        " float scale, bool causal, int window_left, int window_right, float softcap, Tensor? alibi_slopes,"
        " Tensor? sinks, Tensor? query_start_loc_cpu=None, Tensor? key_start_loc_cpu=None) -> ()",
        reference=_varlen_attention,
        cases=varlen_cases,
    )
)
"""Like ``paged_attention``, with the keys of all requests packed one after the other and no cache.

``key``, ``value``: [Tk, Hk, D], request r owning rows key_start_loc[r] to key_start_loc[r + 1]. ``window_right``: a
query at p sees keys up to p + window_right, -1 for all; ``causal`` stands for 0. ``query_start_loc_cpu`` and
``key_start_loc_cpu`` are host copies, as there.
"""
