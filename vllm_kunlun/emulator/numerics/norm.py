"""Norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@emulates("kunlun_ops.rmsnorm")
def rmsnorm(call: Call) -> Mapping[str, Result]:
    """RMS norm."""
    return {"output": rms(call.float32("x"), call["eps"]) * call.float32("weight")}


@emulates("kunlun_ops.gemma_rmsnorm")
def gemma_rmsnorm(call: Call) -> Mapping[str, Result]:
    """RMS norm with weights stored minus one."""
    return {"output": rms(call.float32("x"), call["eps"]) * (1 + call.float32("weight"))}


@emulates("kunlun_ops.add_rmsnorm")
def add_rmsnorm(call: Call) -> Mapping[str, Result]:
    """Addition, then RMS norm."""
    total = _sum(call)
    return {"residual_output": total, "output": rms(total, call["eps"]) * call.float32("weight")}


@emulates("kunlun_ops.gemma_add_rmsnorm")
def gemma_add_rmsnorm(call: Call) -> Mapping[str, Result]:
    """Addition, then RMS norm with weights stored minus one."""
    total = _sum(call)
    return {"residual_output": total, "output": rms(total, call["eps"]) * (1 + call.float32("weight"))}


def _sum(call: Call) -> Tensor:
    """x + y, rounded to their dtype as it is stored."""
    return (call.float32("x") + call.float32("y")).to(call["x"].dtype).float()


@emulates("kunlun_ops.rms_norm_gated")
def rms_norm_gated(call: Call) -> Mapping[str, Result]:
    """Norm of groups of a row, gated by silu(z) before or after."""
    x, gate = call.float32("x"), F.silu(call.float32("z"))
    if not call["norm_before_gate"]:
        x = x * gate
    groups = x.unflatten(-1, (-1, call["group_size"] or x.shape[-1]))
    if not call["is_rms_norm"]:
        groups = groups - groups.mean(-1, keepdim=True)
    normed = rms(groups, call["eps"]).flatten(-2) * call.float32("weight")
    return {"output": normed * gate if call["norm_before_gate"] else normed}


@emulates("kunlun_ops.l2norm")
def l2norm(call: Call) -> Mapping[str, Result]:
    """x / sqrt(sum(x²) + eps)."""
    x = call.float32("x")
    return {"out": x * torch.rsqrt(x.square().sum(-1, keepdim=True) + call["eps"])}
