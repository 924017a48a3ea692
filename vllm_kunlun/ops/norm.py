"""RMS normalisation, with and without a residual addition (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define


def _rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> None:
    x = input.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(x * (weight.float() + weight_offset))


def _fused_add_rms_norm(
    out: Tensor, input: Tensor, residual: Tensor, weight: Tensor, epsilon: float, weight_offset: float
) -> None:
    residual.copy_(input.float() + residual.float())
    _rms_norm(out, residual, weight, epsilon, weight_offset)


_SHAPES = ((1, 576), (0, 64), (7, 33), (3, 5, 128), (130, 1000), (1, 1), (2, 8, 1, 96))


def _cases(generator: torch.Generator, dtype: torch.dtype, residual: bool) -> Iterator[Case]:
    for shape in _SHAPES:
        for offset in (0.0, 1.0):
            x = torch.randn(shape, generator=generator).to(dtype)
            args: dict[str, object] = {"out": torch.empty_like(x), "input": x}
            if residual:
                args["residual"] = torch.randn(shape, generator=generator).to(dtype)
            weight_dtype = torch.float32 if offset and dtype != torch.float32 else dtype
            args["weight"] = torch.randn(shape[-1], generator=generator).to(weight_dtype)
            yield Case(f"{shape}+{offset}", dtype, {**args, "epsilon": 1e-5, "weight_offset": offset})
    yield Case("strided rows", dtype, _strided(generator, dtype, residual))


def _strided(generator: torch.Generator, dtype: torch.dtype, residual: bool) -> dict[str, object]:
    wide = torch.randn(9, 3 * 40, generator=generator).to(dtype)
    args: dict[str, object] = {"out": torch.empty(9, 64, dtype=dtype)[:, :40], "input": wide[:, 40:80]}
    if residual:
        args["residual"] = torch.randn(9, 80, generator=generator).to(dtype)[:, 40:]
    return {**args, "weight": torch.randn(40, generator=generator).to(dtype), "epsilon": 1e-6, "weight_offset": 0.0}


RMS_NORM = define(
    Op(
        name="rms_norm",
        schema="(Tensor(a!) out, Tensor input, Tensor weight, float epsilon, float weight_offset) -> ()",
        reference=_rms_norm,
        cases=lambda generator, dtype: _cases(generator, dtype, residual=False),
    )
)
"""out[..., c] = input[..., c] / sqrt(mean(input²) + epsilon) · (weight[c] + weight_offset).

``weight_offset`` is 1 for Gemma, whose checkpoints store w - 1. ``weight``: [C], the input's dtype or float32.
"""

FUSED_ADD_RMS_NORM = define(
    Op(
        name="fused_add_rms_norm",
        schema="(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, float epsilon, float weight_offset)"
        " -> ()",
        reference=_fused_add_rms_norm,
        cases=lambda generator, dtype: _cases(generator, dtype, residual=True),
    )
)
"""residual += input (rounded to its dtype), then out = rms_norm(residual). ``out`` may be ``input``."""
