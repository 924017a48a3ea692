"""Activations: kunlun_ops.swiglu and kunlun_ops.quick_gelu, and torch's operators where the vendor has no callable.

kunlun_ops.gelu is left alone: the contract does not know which of the two functions of that name it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kunlun.ops.activation import GELU_KINDS
from vllm_kunlun.ops.providers.p800.dense import dense, settle
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Refused, Vendor


def silu_and_mul(vendor: Vendor) -> Implementation:
    """The op `silu_and_mul`."""
    swiglu = vendor.function("kunlun_ops.swiglu")

    def run(out: Tensor, input: Tensor) -> None:
        written = dense(out)
        swiglu(x=input.contiguous(), y=written)
        settle(out, written)

    return run


def gelu_and_mul(vendor: Vendor) -> Implementation:
    """The op `gelu_and_mul`, in torch; rounded once, at the end."""

    def run(out: Tensor, input: Tensor, tanh: bool) -> None:
        gate, up = input.chunk(2, dim=-1)
        activated = torch.nn.functional.gelu(gate.float(), approximate="tanh" if tanh else "none")
        torch.mul(activated, up, out=out)

    return run


def gelu(vendor: Vendor) -> Implementation:
    """The op `gelu`; kind ``quick`` is the vendor's where it is installed."""
    quick = vendor.function("kunlun_ops.quick_gelu") if vendor.has("kunlun_ops.quick_gelu") else _quick_gelu

    def run(out: Tensor, input: Tensor, kind: str) -> None:
        if kind not in GELU_KINDS:
            raise Refused("gelu", f"there is no kind {kind!r}; it must be one of {', '.join(GELU_KINDS)}")
        if kind == "quick":
            written = dense(out)
            quick(input.contiguous(), written)
            settle(out, written)
        else:
            torch.ops.aten.gelu.out(input, approximate="none" if kind == "none" else "tanh", out=out)

    return run


def _quick_gelu(x: Tensor, out: Tensor) -> None:
    torch.mul(x, torch.sigmoid(1.702 * x), out=out)


def swiglu_oai(vendor: Vendor) -> Implementation:
    """The op `swiglu_oai`, in torch in float32: half precision would round after each of its five steps."""

    def run(out: Tensor, input: Tensor, alpha: float, limit: float) -> None:
        pairs = input.float()
        gate, up = pairs[..., ::2].clamp(max=limit), pairs[..., 1::2].clamp(-limit, limit)
        out.copy_((gate * torch.sigmoid(alpha * gate)).mul_(up.add_(1)))

    return run
