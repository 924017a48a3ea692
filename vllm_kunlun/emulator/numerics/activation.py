"""Activations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


def gated_silu(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@emulates("kunlun_ops.swiglu")
def swiglu(call: Call) -> Mapping[str, Result]:
    """SwiGLU."""
    return {"y": gated_silu(call.float32("x"))}


@emulates("kunlun_ops.silu_and_mul")
def silu_and_mul(call: Call) -> Mapping[str, Result]:
    """SwiGLU under its older name."""
    return {"out": gated_silu(call.float32("x"))}


@emulates("kunlun_ops.quick_gelu")
def quick_gelu(call: Call) -> Mapping[str, Result]:
    """x · sigmoid(1.702 x)."""
    x = call.float32("x")
    return {"out": x * torch.sigmoid(1.702 * x)}


@emulates("kunlun_ops.gelu")
def gelu(call: Call) -> Mapping[str, Result]:
    """GELU with the error function."""
    return {"out": F.gelu(call.float32("x"))}
