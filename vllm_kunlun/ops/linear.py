"""Matrix products with weights as they were loaded, [out_features, in_features]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define


def _linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    product = input.float() @ weight.float().T
    out.copy_(product if bias is None else product + bias.float())


def _logits(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _linear(out, hidden, weight, bias)


_SHAPES = ((1, 576, 960), (0, 64, 32), (3, 1536, 576), (16, 100, 33), (17, 64, 1), (65, 96, 130), (200, 576, 63))


def _cases(generator: torch.Generator, dtype: torch.dtype, float_out: bool) -> Iterator[Case]:
    for rows, k, n in _SHAPES:
        x = torch.randn(rows, k, generator=generator).to(dtype)
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype) if rows % 2 else None
        out = torch.empty(rows, n, dtype=torch.float32 if float_out else dtype)
        args = {"out": out, "hidden" if float_out else "input": x, "weight": weight, "bias": bias}
        yield Case(f"{rows}x{k}x{n}", dtype, args)


LINEAR = define(
    Op(
        name="linear",
        schema="(Tensor(a!) out, Tensor input, Tensor weight, Tensor? bias) -> ()",
        reference=_linear,
        cases=lambda generator, dtype: _cases(generator, dtype, float_out=False),
    )
)
"""out[M, N] = input[M, K] @ weight[N, K].T + bias[N], one dtype, accumulated in float32."""

LOGITS = define(
    Op(
        name="logits",
        schema="(Tensor(a!) out, Tensor hidden, Tensor weight, Tensor? bias) -> ()",
        reference=_logits,
        cases=lambda generator, dtype: _cases(generator, dtype, float_out=True),
    )
)
"""As linear, but out is float32 [M, V]: logits are not rounded to the model's dtype."""
