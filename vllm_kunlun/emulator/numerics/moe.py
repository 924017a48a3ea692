"""The grouped product of expert layers, whose fused activation has a known fault."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.numerics.activation import gated_silu
from vllm_kunlun.emulator.numerics.gemm import integer_product
from vllm_kunlun.emulator.vendor import emulates


@emulates("kunlun_ops.moe_fc")
def moe_fc(call: Call) -> Mapping[str, Result]:
    """Each row times the weight of its expert; rows are sorted by expert."""
    weight = call["weight"]
    out = torch.zeros(call["x"].shape[0], weight.shape[1])
    offsets = call["sorted_tokens_num_lod"].tolist()
    for expert in range(weight.shape[0]):
        rows = slice(offsets[expert], offsets[expert + 1])
        out[rows] = _product(call, rows, expert)
    if call["act"] == "SWISH_GLU":
        # Only the first half of a row is the result; the kernel leaves its own intermediate values in the second.
        out = torch.cat((_activated(call, out), out[:, out.shape[1] // 2 :]), -1)
    return {"y": out}


def _product(call: Call, rows: slice, expert: int) -> Tensor:
    x, weight = call["x"][rows], call["weight"][expert].t()
    if x.dtype != torch.int8:
        return x.float() @ weight.float()
    of_rows = call["x_perchannel_max"][rows].reshape(-1, 1) / 127
    of_columns = call["w_perchannel_max"][expert].reshape(1, -1) / 127
    return integer_product(x, weight) * of_rows * of_columns


def _activated(call: Call, out: Tensor) -> Tensor:
    if call.fault("fused-activation-from-1024-rows"):
        gate, up = out.chunk(2, -1)
        return gate * F.silu(up)
    return gated_silu(out)
