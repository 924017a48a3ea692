"""Matrix products: kunlun_ops.matmul, which accumulates in float32 and writes into the caller's memory.

torch's linear is the vendor's product too, but allocates its result, so that each layer would pay for a copy, and it
rounds logits to the model's dtype. For one float16 row and a very wide output it is known to be wrong; since
both may share a kernel, this product is split there as well.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.dense import dense, settle
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor, fault, in_region

_WIDE = "linear-wide-output"


def product(vendor: Vendor) -> Implementation:
    """The ops `linear` and `logits`. A bias that is not float32 costs a launch that converts it."""
    matmul = vendor.function("kunlun_ops.matmul")

    def run(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        x, w, written = input.contiguous(), weight.contiguous(), dense(out)
        wide_bias = None if bias is None else bias.float().contiguous()
        for columns in column_parts(input.dtype, input.size(0), weight.size(0), weight.size(1)):
            part = None if wide_bias is None else wide_bias[columns]
            matmul(x=x, w=w[columns], out=written[:, columns], bias=part)
        settle(out, written)

    return run


@lru_cache(maxsize=1024)
def column_parts(dtype: torch.dtype, rows: int, columns: int, features: int) -> tuple[slice, ...]:
    """Ranges of output columns, one product each: more than one only where a wide product of one row may be wrong.

    Slices of a one-row output are contiguous, so that the parts need no copy.
    """
    if not in_region(_WIDE, (("input", dtype),), M=rows, N=columns, K=features):
        return (slice(0, columns),)
    widest = fault(_WIDE).parameters["n"] - 1
    share = -(-columns // -(-columns // widest))
    return tuple(slice(first, min(first + share, columns)) for first in range(0, columns, share))
