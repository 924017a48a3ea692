"""Writing, addressing and clearing the paged key-value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define

# What stands in slots that no case writes: a kernel that touches them is found out.
_UNTOUCHED = 7.0


def _reshape_and_cache(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> None:
    slots = slot_mapping[: key.size(0)]
    tokens = (slots >= 0).nonzero().flatten()
    block_size = key_cache.size(2)
    blocks, offsets = slots[tokens] // block_size, slots[tokens] % block_size
    key_cache[blocks, :, offsets] = key[tokens].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[tokens].to(value_cache.dtype)


def split_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Key and value views, [num_blocks, num_kv_heads, block_size, head_size], of one tensor, for generated cases.

    `layout`: ``halves`` of [num_blocks, Hk, block_size, 2·head_size] (the host target's), ``stacked`` [2, num_blocks,
    Hk, block_size, head_size], or ``tokens`` of [num_blocks, 2, block_size, Hk, head_size].
    """
    if layout == "halves":
        both = torch.full((num_blocks, num_kv_heads, block_size, 2 * head_size), _UNTOUCHED, dtype=dtype)
        return both[..., :head_size], both[..., head_size:]
    if layout == "stacked":
        both = torch.full((2, num_blocks, num_kv_heads, block_size, head_size), _UNTOUCHED, dtype=dtype)
        return both[0], both[1]
    both = torch.full((num_blocks, 2, block_size, num_kv_heads, head_size), _UNTOUCHED, dtype=dtype)
    return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)


# Tokens, KV heads, head size, block size, number of blocks, layout.
_WRITES = (
    (1, 3, 64, 16, 4, "halves"),
    (0, 2, 32, 16, 2, "halves"),
    (37, 1, 72, 16, 5, "stacked"),
    (40, 8, 128, 32, 3, "tokens"),
    (16, 4, 80, 5, 9, "halves"),
    (300, 2, 96, 256, 2, "halves"),
)


def _write_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, size, block_size, num_blocks, layout in _WRITES:
        key_cache, value_cache = split_cache(num_blocks, heads, block_size, size, layout, dtype)
        qkv = torch.randn(tokens, 3 * heads * size, generator=generator).to(dtype)
        key, value = (qkv[:, i * heads * size : (i + 1) * heads * size].view(tokens, heads, size) for i in (1, 2))
        slots = torch.randperm(num_blocks * block_size, generator=generator)[: tokens + 3]
        slots[1::4] = -1
        args = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value, "slot_mapping": slots}
        yield Case(f"{tokens} tokens {heads}x{size} block {block_size} {layout}", dtype, args)


RESHAPE_AND_CACHE = define(
    Op(
        name="reshape_and_cache",
        schema="(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor slot_mapping) -> ()",
        reference=_reshape_and_cache,
        cases=_write_cases,
        exact=frozenset({"key_cache", "value_cache"}),
    )
)
"""Writes the step's keys and values into the cache.

``key_cache``, ``value_cache``: [num_blocks, Hk, block_size, D], any strides but the last contiguous, of the type of
``key``. ``key``, ``value``: [T, Hk, D]. ``slot_mapping``: int64 [≥ T]; token t goes to block slot // block_size at
offset slot % block_size, a negative slot is skipped. Raises on a slot outside the cache.
"""


def _slot_mapping(
    out: Tensor, query_start_loc: Tensor, positions: Tensor, block_table: Tensor, block_size: int, pad_id: int
) -> None:
    num_requests = query_start_loc.numel() - 1
    total = int(query_start_loc[-1]) if num_requests >= 0 else 0
    lengths = query_start_loc.diff().long()
    requests = torch.repeat_interleave(torch.arange(num_requests, device=out.device), lengths)
    where = positions[:total].long()
    blocks = block_table[requests, where // block_size].long()
    out[:total] = blocks * block_size + where % block_size
    out[total:] = pad_id


# Query lengths, first positions, block size, pad rows.
_MAPPINGS: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int], ...] = (
    ((1,), (0,), 16, 0),
    ((1, 1, 1), (15, 16, 17), 16, 5),
    ((5, 1, 0, 33, 16), (0, 255, 0, 15, 16), 16, 8),
    ((), (), 16, 4),
    ((7, 2), (3, 62), 5, 1),
    ((300,), (0,), 256, 0),
)


def _mapping_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for lengths, firsts, block_size, pad in _MAPPINGS:
        total = sum(lengths)
        most = max((f + n for f, n in zip(firsts, lengths, strict=True)), default=1)
        columns = -(-most // block_size)
        table = torch.randint(0, 2**20, (len(lengths) + 1, columns + 2), generator=generator, dtype=torch.int32)
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        spans = [torch.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)]
        positions = torch.cat([*spans, torch.zeros(pad, dtype=torch.int64)])
        args = {
            "out": torch.empty(total + pad, dtype=torch.int64),
            "query_start_loc": starts,
            "positions": positions,
            "block_table": table[:, :columns],
            "block_size": block_size,
            "pad_id": -1,
        }
        yield Case(f"{lengths} from {firsts} block {block_size}", dtype, args)


SLOT_MAPPING = define(
    Op(
        name="slot_mapping",
        schema="(Tensor(a!) out, Tensor query_start_loc, Tensor positions, Tensor block_table, int block_size,"
        " int pad_id) -> ()",
        reference=_slot_mapping,
        cases=_mapping_cases,
        dtypes=(torch.float32,),
        exact=frozenset({"out"}),
    )
)
"""out[t] = block_table[request of t, positions[t] // block_size] · block_size + positions[t] % block_size.

``out``: int64 [max_tokens], ``pad_id`` from query_start_loc[-1] on. ``query_start_loc``: int32 [B+1] from 0.
``positions``: int64 [≥ query_start_loc[-1]]. ``block_table``: int32 [≥ B, max_blocks]. Raises on a position outside the
table.
"""


def _zero_blocks(kv_cache: Tensor, block_ids: Tensor) -> None:
    kv_cache[block_ids.long()] = 0


def _zero_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    def cache(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    caches = {
        "contiguous": cache(6, 3, 16, 128),
        "halves": cache(6, 3, 16, 128)[..., 64:],
        "stacked": cache(2, 6, 3, 16, 64).transpose(0, 1),
        "tokens": cache(6, 2, 5, 3, 72)[:, 1].transpose(1, 2),
        "every second column": cache(6, 4, 10)[..., ::2],
    }
    for name, kv_cache in caches.items():
        for ids in ([], [5], [4, 0, 3]):
            index = torch.tensor(ids, dtype=torch.int64 if len(ids) == 1 else torch.int32)
            yield Case(f"{name} {ids}", dtype, {"kv_cache": kv_cache, "block_ids": index})


ZERO_BLOCKS = define(
    Op(
        name="zero_blocks",
        schema="(Tensor(a!) kv_cache, Tensor block_ids) -> ()",
        reference=_zero_blocks,
        cases=_zero_cases,
        exact=frozenset({"kv_cache"}),
    )
)
"""kv_cache[block_ids] = 0. ``kv_cache``: [num_blocks, ...], any strides and type. ``block_ids``: int32 or int64 [n].

Raises on an id outside the cache, before anything is written.
"""
