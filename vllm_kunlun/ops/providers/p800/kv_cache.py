"""Writing, addressing and clearing the paged cache, [2, num_blocks, Hk, block_size, D] on this target.

Slots, blocks and positions are not checked on the device: the host would have to wait to hear of a wrong one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.vendor import Implementation, Refused, Vendor


def reshape_and_cache(vendor: Vendor) -> Implementation:
    """The op `reshape_and_cache`.

    Contiguous caches go through kunlun_ops.reshape_and_cache, right for any number of KV heads. The other callable
    takes strided views, but writes values of several heads to wrong slots unless tokens come before heads in them.
    """
    contiguous = vendor.function("kunlun_ops.reshape_and_cache")
    strided = vendor.function("kunlun_ops.reshape_and_cache_flash")
    slot_dtype = vendor.answers.slot_dtype

    def run(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        tokens = key.size(0)
        if tokens == 0:
            return
        rows = (key.contiguous(), value.contiguous())
        slots = slot_mapping[:tokens].to(slot_dtype)
        if key_cache.is_contiguous() and value_cache.is_contiguous():
            contiguous(*rows, key_cache, value_cache, slots)
            return
        tokens_first = key_cache.stride(2) > key_cache.stride(1)
        if not tokens_first and key_cache.size(1) > 1:
            raise Refused("reshape_and_cache", _STRIDED)
        caches = [c.transpose(1, 2) if tokens_first else c for c in (key_cache, value_cache)]
        strided(*rows, *caches, slots, BLHD_LAYOUT=tokens_first)

    return run


_STRIDED = (
    "the caches are strided views with several KV heads before the tokens of a block; the vendor's callable for strided"
    " views writes the values of several heads to wrong slots (known fault value-slots-several-kv-heads). Lay the cache"
    " out as [2, num_blocks, Hk, block_size, D] and pass its halves"
)


def owners(starts: Tensor, rows: int) -> Tensor:
    """The request that each of `rows` packed rows belongs to, int64; past the last one: the number of requests.

    ``starts``: int32 [B + 1] from 0. Counts with a cumulative sum: searchsorted has no kernel on the device.
    """
    marks = torch.zeros(rows + 1, dtype=torch.int64, device=starts.device)
    ends = starts[1:].long()
    marks.scatter_add_(0, ends, torch.ones_like(ends))
    return marks[:rows].cumsum(0)


def slot_mapping(vendor: Vendor) -> Implementation:
    """The op `slot_mapping` in torch: of the vendor's callable only the name is known."""

    def run(
        out: Tensor, query_start_loc: Tensor, positions: Tensor, block_table: Tensor, block_size: int, pad_id: int
    ) -> None:
        requests = query_start_loc.numel() - 1
        rows = min(out.size(0), positions.size(0))
        if requests < 1 or rows < out.size(0):
            out.fill_(pad_id)
        if requests < 1:
            return
        owner, where = owners(query_start_loc, rows), positions[:rows]
        column = (where // block_size).clamp(0, block_table.size(1) - 1)
        block = block_table[owner.clamp(max=requests - 1), column].long()
        slots = block * block_size + where % block_size
        out[:rows] = torch.where(owner < requests, slots, pad_id)

    return run


def zero_blocks(vendor: Vendor) -> Implementation:
    """The op `zero_blocks`; filling by index refuses an empty index on the device, writing by index does not."""

    def run(kv_cache: Tensor, block_ids: Tensor) -> None:
        if block_ids.numel():
            kv_cache.index_put_((block_ids.long(),), kv_cache.new_zeros(()))

    return run
