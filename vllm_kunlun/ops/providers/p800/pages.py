"""Views of the paged cache that the vendor's attention reads right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.kv_cache import owners
from vllm_kunlun.ops.providers.p800.vendor import Refused

_LAYOUT = (
    "the caches must be contiguous, [num_blocks, Hk, block_size, D] each, or the blocks of both in turn in one buffer;"
    " the kernel computes a block's address from its number alone (known fault paged-view-address)"
)


class Pages(NamedTuple):
    """Contiguous caches [num_blocks, Hk, block_size, D]; each number of a block table stands for `stride` of them."""

    key: Tensor
    value: Tensor
    stride: int

    def table(self, block_table: Tensor) -> Tensor:
        """The block table in numbers of these blocks, contiguous."""
        return (block_table * self.stride if self.stride > 1 else block_table).contiguous()

    def gathered(self, block_table: Tensor, key_starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all requests one after the other, [total, Hk, D]; `block_table` is `table`'s."""
        row = torch.arange(total, device=key_starts.device)
        owner = owners(key_starts, total)
        place, size = row - key_starts[owner], self.key.size(2)
        block = block_table[owner, place // size].long()
        return self.key[block, :, place % size], self.value[block, :, place % size]


def pages_of(op: str, key_cache: Tensor, value_cache: Tensor) -> Pages:
    """The caches as the kernel reads them; raises Refused where it would read other blocks.

    Where the blocks of keys and values alternate in one buffer, both views run over all of it, a block apart, so that
    block b of the keys is block 2b of one and of the other.
    """
    if key_cache.is_contiguous() and value_cache.is_contiguous():
        return Pages(key_cache, value_cache, 1)
    if not _alternate(key_cache, value_cache):
        raise Refused(op, _LAYOUT)
    shape = (2 * key_cache.size(0) - 1, *key_cache.shape[1:])
    strides = (key_cache.stride(0) // 2, *key_cache.stride()[1:])
    return Pages(key_cache.as_strided(shape, strides), value_cache.as_strided(shape, strides), 2)


def _alternate(key_cache: Tensor, value_cache: Tensor) -> bool:
    block = key_cache[0].numel()
    return (
        key_cache[0].is_contiguous()
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride(0) == 2 * block
        and value_cache.data_ptr() - key_cache.data_ptr() == block * key_cache.element_size()
    )
