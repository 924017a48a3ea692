"""Matrix products and quantisation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


@emulates("kunlun_ops.quant2d")
def quant2d(call: Call) -> Mapping[str, Result]:
    """Dynamic int8 per row, with the row's largest absolute value."""
    x = call.float32("x")
    largest = x.abs().amax(-1, keepdim=True)
    return {"y": torch.round(x / largest.clamp_min(1e-30) * 127), "max": largest}


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N] of int8 values; the sum is exact before it becomes float32."""
    return (a.double() @ b.double()).float()


@emulates("kunlun_ops.matmul")
def matmul(call: Call) -> Mapping[str, Result]:
    """alpha · x·w + beta · out + bias; int8 values are worth max/127."""
    weight = call["w"].t() if call["w_trans"] else call["w"]
    if call["x"].dtype == torch.int8:
        product = integer_product(call["x"], weight)
        product = product * (call["x_pc_max"].reshape(-1, 1) / 127) * (call["w_pc_max"].reshape(1, -1) / 127)
    else:
        product = call["x"].float() @ weight.float()
    total = call["alpha"] * product
    if call["beta"]:
        total = total + call["beta"] * call.float32("out")
    return {"out": total + call["bias"] if call.given("bias") else total}


@emulates("xspeedgate_ops.static_scaled_int8_quant")
def static_scaled_int8_quant(call: Call) -> Mapping[str, Result]:
    """One scale of the whole tensor."""
    return {"x_q": torch.round(call.float32("x") / call["scale"].reshape(())).clamp(-128, 127)}


@emulates("xspeedgate_ops.dynamic_scaled_int8_quant")
def dynamic_scaled_int8_quant(call: Call) -> Mapping[str, Result]:
    """A scale of each row; with azp a zero point of each row too."""
    x = call.float32("x")
    if not call.given("azp"):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return {"x_q": torch.round(x / scale.clamp_min(1e-30)).clamp(-127, 127), "scale": scale}
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((most - least) / 255).clamp_min(1e-30)
    zero = torch.round(-128 - least / scale)
    return {"x_q": (torch.round(x / scale) + zero).clamp(-128, 127), "scale": scale, "azp": zero}


def _scaled(call: Call, product: Tensor) -> Tensor:
    total = call["scale_a"].reshape(-1, 1) * call["scale_b"].reshape(1, -1) * product
    return total + call.float32("bias") if call.given("bias") else total


@emulates("xspeedgate_ops.cutlass_scaled_mm")
def cutlass_scaled_mm(call: Call) -> Mapping[str, Result]:
    """int8 product with true scales."""
    return {"out": _scaled(call, integer_product(call["a"], call["b"]))}


@emulates("xspeedgate_ops.cutlass_scaled_mm_azp")
def cutlass_scaled_mm_azp(call: Call) -> Mapping[str, Result]:
    """int8 product of asymmetric rows; azp_adj holds b's column sums, times the zero point where azp is None."""
    correction = call["azp_adj"].reshape(1, -1).float()
    if call.given("azp"):
        correction = correction * call["azp"].reshape(-1, 1)
    return {"out": _scaled(call, integer_product(call["a"], call["b"]) - correction)}
