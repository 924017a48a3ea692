"""Attention over dense and paged keys, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Partial, Result
from vllm_kunlun.emulator.vendor import emulates


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: `behind` and `ahead` are distances, None without a limit; `slopes` are ALiBi's [H]."""

    behind: int | None = None
    ahead: int | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    """Attention of one request; the last query stands at the last key.

    query [n, H, D], key and value [m, Hk, D] in float32; returns [n, H, D] and the log-sum-exp [H, n].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scale
    places = torch.arange(key.shape[0] - query.shape[0], key.shape[0])[:, None]
    distance = places - torch.arange(key.shape[0])
    if mask.slopes is not None:
        scores = scores - mask.slopes[:, None, None] * distance
    scores = scores.masked_fill(_hidden(distance, mask), -math.inf)
    if mask.sink is not None:
        scores = torch.cat((scores, mask.sink[:, None, None].expand(-1, query.shape[0], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[0]]
    return torch.einsum("hnm,mhd->nhd", weights, value), torch.logsumexp(scores, -1)


def _hidden(distance: Tensor, mask: Mask) -> Tensor:
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if mask.behind is not None:
        hidden |= distance > mask.behind
    if mask.ahead is not None:
        hidden |= -distance > mask.ahead
    return hidden


def _behind(call: Call, window: int) -> int | None:
    """Distance to the farthest visible key for a window; negative windows mean none."""
    if window < 0:
        return None
    return window if call.fault("sliding-window-off-by-one") else max(window - 1, 0)


def _pages(call: Call, cache: str, table: Tensor, length: int) -> Tensor:
    """The first `length` rows of a request's paged keys or values, [length, Hk, D] in float32."""
    pages: Tensor = call[cache]
    block_size = pages.shape[2]
    needed = -(-length // block_size)
    blocks = table[:needed].long()
    outside = blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < pages.shape[0]
    if needed > table.shape[0] or outside:
        call.refuse(
            f"reads outside the block table: {length} tokens need {needed} blocks of the {pages.shape[0]} in {cache},"
            f" the row is {table.tolist()}"
        )
    if call.fault("paged-view-address"):
        pages = pages.as_strided(pages.shape, torch.empty(pages.shape, device="meta").stride(), pages.storage_offset())
    return pages[blocks].transpose(1, 2).flatten(0, 1)[:length].float()


def _slopes(call: Call, name: str) -> Tensor | None:
    return call.float32(name) if call.given(name) else None


@emulates("kunlun_ops.prefill_attention")
def prefill_attention(call: Call) -> Mapping[str, Result]:
    """Attention of requests of different lengths, over dense keys or over the paged cache."""
    query = call.float32("q")
    out, lse = torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])
    scale = call["alpha"] / math.sqrt(query.shape[-1])
    mask = _prefill_mask(call)
    queries, keys = call["context_qlen_lod_xpu"].tolist(), call["context_kvlen_lod_xpu"].tolist()
    for request in range(len(queries) - 1):
        span = slice(queries[request], queries[request + 1])
        key, value = _prefill_keys(call, request, keys)
        if call["is_causal"] and span.stop - span.start > key.shape[0]:
            call.refuse(f"request {request} has {span.stop - span.start} causal queries and {key.shape[0]} keys")
        if span.stop > span.start:
            out[span], lse[:, span] = attend(query[span], key, value, scale, mask)
    written = torch.arange(query.shape[0]) < queries[-1]
    results: dict[str, Result] = {"out": Partial(out, written)}
    if call.given("softmax_lse"):
        results["softmax_lse"] = Partial(lse, written, dim=1)
    return results


def _prefill_mask(call: Call) -> Mask:
    if call.fault("prefix-path-ignores-window-and-sinks"):
        return Mask(ahead=0 if call["is_causal"] else None, slopes=_slopes(call, "alibi_slopes"))
    ahead = call["swa_right"] if call["swa_right"] >= 0 else None
    return Mask(
        behind=_behind(call, call["swa_left"]),
        ahead=0 if call["is_causal"] else ahead,
        slopes=_slopes(call, "alibi_slopes"),
        sink=_slopes(call, "sink"),
    )


def _prefill_keys(call: Call, request: int, offsets: list[int]) -> tuple[Tensor, Tensor]:
    start, stop = offsets[request], offsets[request + 1]
    if call["is_prefix_cache"]:
        table = call["block_table"][request]
        return _pages(call, "k", table, stop - start), _pages(call, "v", table, stop - start)
    if stop > call.dims["Tk"]:
        call.refuse(f"context_kvlen_lod_xpu ends at {offsets[-1]}, past the {call.dims['Tk']} keys there are")
    return call["k"][start:stop].float(), call["v"][start:stop].float()


@emulates("kunlun_ops.speculative_attention")
def speculative_attention(call: Call) -> Mapping[str, Result]:
    """Decode attention of the same number of new tokens of each request; rows of context length 0 are not written."""
    batch, qlen = call["batch_num"], call["qlen"]
    query = call.float32("q").reshape(batch, qlen, call["head_num"], call["head_dim"])
    scale = call["scale"] or 1 / math.sqrt(call["head_dim"])
    sink = _slopes(call, "sink")
    mask = Mask(behind=_behind(call, call["max_window_size"]), ahead=0, sink=sink)
    out = _decode(call, query, "block_tables", scale, mask)
    return {"out": _rows(call, out)}


@emulates("kunlun_ops.paged_attention")
def paged_attention(call: Call) -> Mapping[str, Result]:
    """Decode attention of one new token of each request, with the default scale."""
    query = call.float32("x").unsqueeze(1)
    out = _decode(call, query, "block_tables", 1 / math.sqrt(query.shape[-1]), Mask())
    return {"out": _rows(call, out)}


def _decode(call: Call, query: Tensor, tables: str, scale: float, mask: Mask) -> Tensor:
    """query [B, qlen, H, D] over the paged keys of each request."""
    out = torch.zeros_like(query)
    for request, length in enumerate(call["context_lens_xpu"].tolist()):
        if 0 < length < query.shape[1]:
            call.refuse(f"request {request} has {query.shape[1]} new tokens and a context of {length} with them")
        if length:
            table = call[tables][request]
            key, value = _pages(call, "k_cache", table, length), _pages(call, "v_cache", table, length)
            out[request] = attend(query[request], key, value, scale, mask)[0]
    return out


def _rows(call: Call, out: Tensor) -> Partial:
    """[B, qlen, H, D] in the shape of `out`, with the rows of padded requests left out."""
    return Partial(out, call["context_lens_xpu"] > 0)


@emulates("kunlun_ops.attention_merge_stage")
def attention_merge_stage(call: Call) -> Mapping[str, Result]:
    """Weights two partial results by their share of the sum of exponentials."""
    prefix, suffix = call["prefix_lse"], call["suffix_lse"]
    total = torch.logaddexp(prefix, suffix)
    # A part without keys has a log-sum-exp of minus infinity; where both have none, neither weighs.
    shares = [torch.exp(part - total).nan_to_num(0.0).T.unsqueeze(-1) for part in (prefix, suffix)]
    merged = call.float32("prefix_output") * shares[0] + call.float32("suffix_output") * shares[1]
    return {"output": merged, "output_lse": total}
