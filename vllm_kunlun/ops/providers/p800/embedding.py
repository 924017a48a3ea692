"""Embedding rows, and the split of a vocabulary over ranks.

A kernel on the device cannot tell the host of an id outside the table without the host waiting for it; these ops do not
check ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kunlun.ops.embedding import VOCAB_PARALLEL_MASK
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor

MASK = "xspeedgate_ops.get_masked_input_and_mask"


def embedding(vendor: Vendor) -> Implementation:
    """The op `embedding`: torch's row selection."""

    def run(out: Tensor, ids: Tensor, weight: Tensor) -> None:
        torch.index_select(weight, 0, ids, out=out)

    return run


def vocab_parallel_mask(vendor: Vendor) -> Implementation:
    """The op `vocab_parallel_mask`; torch's comparisons where the wheel lacks the callable, as several do."""
    if not vendor.has(MASK):
        return VOCAB_PARALLEL_MASK.reference
    masked_input = vendor.function(MASK)

    def run(
        local_ids: Tensor,
        outside: Tensor,
        ids: Tensor,
        org_start: int,
        org_end: int,
        num_org_padding: int,
        added_start: int,
        added_end: int,
    ) -> None:
        masked, mask = masked_input(ids.contiguous(), org_start, org_end, num_org_padding, added_start, added_end)
        local_ids.copy_(masked)
        outside.copy_(mask)

    return run
