"""Writes to the paged KV cache and copies of its blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


def _targets(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens that have a slot, and the block and offset of each; a negative slot is skipped."""
    slots = call["slot_mapping"].long()
    rows = (slots >= 0).nonzero().flatten()
    slots = slots[rows]
    return rows, slots // call.dims["BS"], slots % call.dims["BS"]


@emulates("kunlun_ops.reshape_and_cache")
def reshape_and_cache(call: Call) -> Mapping[str, Result]:
    """Scatters keys and values; the caches are [NB, Hk, BS, D]."""
    rows, blocks, offsets = _targets(call)
    for name in ("key", "value"):
        call[f"{name}_cache"][blocks, :, offsets] = call[name][rows]
    return {}


@emulates("kunlun_ops.reshape_and_cache_flash")
def reshape_and_cache_flash(call: Call) -> Mapping[str, Result]:
    """The same for strided caches of either layout."""
    rows, blocks, offsets = _targets(call)
    for name in ("key", "value"):
        cache, new = call[f"{name}_cache"], call[name][rows]
        if call["BLHD_LAYOUT"]:
            cache[blocks, offsets] = new
        elif name == "value" and call.fault("value-slots-several-kv-heads"):
            _tokens_before_heads(cache, new, blocks, offsets)
        else:
            cache[blocks, :, offsets] = new
    return {}


def _tokens_before_heads(cache: Tensor, new: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Writes to a [NB, Hk, BS, D] cache as if it were [NB, BS, Hk, D]; right for a single head only."""
    heads, block_size = cache.shape[1], cache.shape[2]
    row = offsets[:, None] * heads + torch.arange(heads)
    cache[blocks[:, None], row // block_size, row % block_size] = new


@emulates("kunlun_ops.swap_blocks")
def swap_blocks(call: Call) -> Mapping[str, Result]:
    """Copies blocks from one cache to another."""
    source, target = call["block_mapping"].long().unbind(1)
    for name, blocks, count in (("src", source, call.dims["NS"]), ("dst", target, call.dims["ND"])):
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < count:
            call.refuse(f"block_mapping names a block outside {name}, which has {count}")
    call["dst"][target] = call["src"][source]
    return {}


@emulates("kunlun_ops.copy_blocks")
def copy_blocks(call: Call) -> Mapping[str, Result]:
    """Copies blocks within each cache."""
    source, target = call["block_mapping"].long().unbind(1)
    for cache in (*call["key_caches"], *call["value_caches"]):
        mapped = call["block_mapping"]
        if mapped.numel() and not 0 <= int(mapped.min()) <= int(mapped.max()) < cache.shape[0]:
            call.refuse(f"block_mapping names a block outside a cache of {cache.shape[0]}")
        cache[target] = cache[source]
    return {}


@emulates("kunlun_ops.compute_slot_mappings")
def compute_slot_mappings(call: Call) -> Mapping[str, Result]:
    """Slots of the tokens of each KV cache group."""
    starts = call["query_start_loc"].tolist()
    mappings = torch.full(call["slot_mappings"].shape, -1, dtype=torch.int64)
    groups = list(zip(call["block_tables"], call["block_sizes"], strict=True))
    if len(groups) != mappings.shape[0]:
        call.refuse(f"slot_mappings has {mappings.shape[0]} rows for {len(groups)} block tables")
    for group, (block_table, block_size) in enumerate(groups):
        for request, row in enumerate(call["idx_mapping"].tolist()):
            span = slice(starts[request], starts[request + 1])
            mappings[group, span] = _slots(call, block_table, row, call["positions"][span].long(), block_size)
    return {"slot_mappings": mappings}


def _slots(call: Call, block_table: Tensor, row: int, positions: Tensor, block_size: int) -> Tensor:
    entries = positions // block_size
    if not 0 <= row < block_table.shape[0] or (entries.numel() and int(entries.max()) >= block_table.shape[1]):
        call.refuse(
            f"reads outside the block table {list(block_table.shape)}: row {row}, positions {positions.tolist()}"
        )
    return block_table[row][entries].long() * block_size + positions % block_size
