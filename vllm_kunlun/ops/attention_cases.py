"""Generated calls of the attention ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case
from vllm_kunlun.ops.kv_cache import split_cache

# What an unused entry of a block table may hold; a kernel that follows it leaves the cache.
_GARBAGE_BLOCKS = (2**30, -7)


@dataclass(frozen=True)
class _Batch:
    """A batch by its requests, (queries, keys) each, and the options that differ from plain causal attention."""

    name: str
    requests: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (3, 1)
    head_size: int = 64
    block_size: int = 16
    layout: str = "halves"
    pad: int = 0
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False


_MIXED = ((1, 50), (1, 1), (20, 70), (33, 33), (0, 0), (1, 129), (5, 16))
_EDGES = tuple((q, k) for k in (15, 16, 17, 31, 32, 33) for q in (1, k))

_PAGED = (
    _Batch("one decode", ((1, 37),)),
    _Batch("mixed", _MIXED, heads=(9, 3), pad=3),
    _Batch("block edges", _EDGES, heads=(4, 2), head_size=32),
    _Batch("block edges, stacked", _EDGES, heads=(2, 2), head_size=96, layout="stacked"),
    _Batch("long prefill", ((300, 300),), heads=(6, 2), pad=1),
    _Batch("chunk after a long context", ((40, 700),), heads=(2, 1), head_size=128, block_size=32),
    _Batch("long decode", ((1, 1500), (1, 3)), heads=(9, 3), block_size=128),
    _Batch("decode one to one", ((1, 600), (1, 65), (1, 64)), heads=(4, 4), layout="tokens"),
    _Batch("decode 8 to 1", ((1, 600), (1, 63), (2, 200)), heads=(16, 2), head_size=128),
    _Batch("multi-query", ((1, 40), (9, 40), (3, 3)), heads=(20, 1), head_size=80),
    _Batch("many heads a group", ((2, 19),), heads=(71, 1), head_size=64),
    _Batch("speculative rows", ((4, 300), (5, 77), (2, 2)), heads=(9, 3)),
    _Batch("empty", ()),
    _Batch("no requests, pad rows", (), pad=4),
    _Batch("head size 72", _MIXED, heads=(4, 2), head_size=72, layout="stacked"),
    _Batch("head size 112", _MIXED, heads=(4, 2), head_size=112, block_size=64, scale=0.3),
    _Batch("head size 120", _MIXED, heads=(3, 3), head_size=120, block_size=7),
    _Batch("head size 256", _MIXED, heads=(2, 1), head_size=256, block_size=256),
    _Batch("head size 512", ((1, 30), (17, 17)), heads=(2, 2), head_size=512),
    _Batch("odd head size", ((1, 30), (17, 19)), heads=(2, 1), head_size=33),
    _Batch("not causal", _MIXED, heads=(4, 2), causal=False),
    _Batch("window", (*_MIXED, (1, 400), (200, 200), (40, 333)), heads=(6, 2), window=(31, -1), pad=2),
    _Batch("window of one", _MIXED, heads=(2, 2), window=(0, -1)),
    _Batch("window wider than all", _MIXED, window=(4096, -1)),
    _Batch("window, not causal", _MIXED, window=(20, -1), causal=False),
    _Batch("softcap", _MIXED, heads=(4, 2), head_size=128, softcap=20.0, scale=0.5),
    _Batch("sinks", (*_MIXED, (1, 900)), heads=(8, 1), sinks=True),
    _Batch("sinks and window", (*_MIXED, (1, 900)), heads=(8, 2), window=(127, -1), sinks=True, pad=1),
    _Batch("alibi", (*_MIXED, (1, 900)), heads=(8, 8), alibi=True),
    _Batch("everything", (*_MIXED, (1, 900)), window=(60, -1), softcap=5.0, alibi=True, sinks=True, pad=2),
    _Batch("more queries than keys", ((6, 4), (5, 0), (1, 0)), heads=(2, 1)),
    _Batch("more queries than keys, sinks", ((6, 4), (1, 0)), heads=(2, 1), sinks=True),
)

_VARLEN = (
    _Batch("encoder", ((17, 17), (1, 1), (130, 130), (64, 64)), heads=(4, 4), causal=False),
    _Batch("encoder, head size 80", ((65, 65), (50, 50)), heads=(2, 2), head_size=80, causal=False, pad=2),
    _Batch("cross", ((5, 40), (40, 5), (3, 0), (0, 9)), heads=(6, 2), causal=False),
    _Batch("causal", _MIXED, heads=(9, 3), pad=1),
    _Batch("windows", ((100, 100), (7, 90)), heads=(4, 2), head_size=128, causal=False, window=(10, 3)),
    _Batch("right window", ((100, 100), (7, 90)), causal=False, window=(-1, 5), sinks=True),
    _Batch("causal wins over the right window", ((50, 50),), window=(12, 9)),
    _Batch("softcap and alibi", ((50, 50), (1, 90)), heads=(4, 1), causal=False, softcap=15.0, alibi=True),
    _Batch("empty", (), causal=False),
)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def _packed(batch: _Batch, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of each query's token, as views of one qkv tensor. [T, heads, head_size]."""
    tokens = sum(q for q, _ in batch.requests) + batch.pad
    (heads, kv_heads), size = batch.heads, batch.head_size
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, generator=generator).to(dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def _options(batch: _Batch, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    heads = batch.heads[0]
    alibi = torch.rand(heads, generator=generator) if batch.alibi else None
    sinks = torch.randn(heads, generator=generator).to(dtype) if batch.sinks else None
    return {"softcap": batch.softcap, "alibi_slopes": alibi, "sinks": sinks}


def _scale(batch: _Batch) -> float:
    return batch.head_size**-0.5 if batch.scale is None else batch.scale


def _pages(batch: _Batch, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """A cache whose unused slots are infinite, and a block table of shuffled ids with a garbage tail."""
    needed = [-(-k // batch.block_size) for _, k in batch.requests]
    ids = torch.randperm(sum(needed) + 2, generator=generator, dtype=torch.int32)
    table = torch.empty(len(needed), max(needed, default=0) + 2, dtype=torch.int32)
    table[:, ::2], table[:, 1::2] = _GARBAGE_BLOCKS
    caches = split_cache(len(ids), batch.heads[1], batch.block_size, batch.head_size, batch.layout, dtype)
    for cache in caches:
        cache.fill_(float("inf"))
    for request, (blocks, (_, length)) in enumerate(zip(ids[: sum(needed)].split(needed), batch.requests, strict=True)):
        table[request, : len(blocks)] = blocks
        for cache in caches:
            _fill(cache, blocks, length, generator)
    return {"key_cache": caches[0], "value_cache": caches[1], "block_table": table}


def _fill(cache: Tensor, blocks: Tensor, length: int, generator: torch.Generator) -> None:
    slots = torch.arange(length)
    values = torch.randn(length, cache.size(1), cache.size(3), generator=generator).to(cache.dtype)
    cache[blocks.long()[slots // cache.size(2)], :, slots % cache.size(2)] = values


def paged_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    """Calls of ``paged_attention``; queries are strided views and the cache has each layout in turn."""
    for batch in _PAGED:
        query = _packed(batch, generator, dtype)[0]
        pages = _pages(batch, generator, dtype)
        starts = _starts([q for q, _ in batch.requests])
        lengths = torch.tensor([k for _, k in batch.requests], dtype=torch.int32)
        args = {
            "out": torch.empty(query.shape, dtype=dtype),
            "query": query,
            **pages,
            "query_start_loc": starts,
            "seq_lens": lengths,
            "scale": _scale(batch),
            "causal": batch.causal,
            "window_left": batch.window[0],
            **_options(batch, generator, dtype),
            "query_start_loc_cpu": starts.clone(),
            "seq_lens_cpu": lengths.clone(),
        }
        yield Case(batch.name, dtype, args)


def varlen_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    """Calls of ``varlen_attention``; where queries and keys are as many they are views of one tensor."""
    for batch in _VARLEN:
        query, key, value = _packed(batch, generator, dtype)
        keys = [k for _, k in batch.requests]
        if keys != [q for q, _ in batch.requests]:
            both = torch.randn(2, sum(keys), batch.heads[1], batch.head_size, generator=generator).to(dtype)
            key, value = both[0], both[1]
        starts, key_starts = _starts([q for q, _ in batch.requests]), _starts(keys)
        args = {
            "out": torch.empty(query.shape, dtype=dtype),
            "query": query,
            "key": key,
            "value": value,
            "query_start_loc": starts,
            "key_start_loc": key_starts,
            "scale": _scale(batch),
            "causal": batch.causal,
            "window_left": batch.window[0],
            "window_right": batch.window[1],
            **_options(batch, generator, dtype),
            "query_start_loc_cpu": starts.clone(),
            "key_start_loc_cpu": key_starts.clone(),
        }
        yield Case(batch.name, dtype, args)
