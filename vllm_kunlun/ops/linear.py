"""Matrix products with weights as they were loaded, [out_features, in_features]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define

_LOGITS_ROWS = 8192


def _linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    product = input.float() @ weight.float().T
    out.copy_(product if bias is None else product + bias.float())


def _logits(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _linear(out, hidden, weight, bias)


def torch_linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The op `linear` with torch's product in the tensors' own type; torch accumulates in float32 there too."""
    out.copy_(torch.nn.functional.linear(input, weight, bias))


def torch_logits(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The op `logits` a part of the vocabulary at a time, so that no float32 copy of the whole table is made."""
    wide = hidden.float()
    for first in range(0, weight.size(0), _LOGITS_ROWS):
        rows = slice(first, first + _LOGITS_ROWS)
        _linear(out[:, rows], wide, weight[rows], None if bias is None else bias[rows])


# (tokens, in features, out features): one token, none, few; sizes that do and do not fill vectors, tiles and row
# groups; fewer rows than a group; as many tokens as make the weights worth transposing, and a full prefill block.
_SHAPES = (
    (1, 576, 960),
    (1, 100, 33),
    (0, 64, 32),
    (2, 72, 40),
    (3, 1536, 576),
    (4, 7, 3),
    (5, 1, 2),
    (16, 100, 33),
    (17, 64, 1),
    (33, 1024, 272),
    (65, 96, 130),
    (200, 576, 63),
    (100, 37, 515),
)


def _case(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int, int], logits: bool) -> Case:
    tokens, k, n = shape
    args = {
        "out": torch.empty(tokens, n, dtype=torch.float32 if logits else dtype),
        "hidden" if logits else "input": torch.randn(tokens, k, generator=generator).to(dtype),
        "weight": (torch.randn(n, k, generator=generator) / k**0.5).to(dtype),
        "bias": torch.randn(n, generator=generator).to(dtype) if tokens % 2 else None,
    }
    return Case(f"{tokens}x{k}x{n}", dtype, args)


def _strided(generator: torch.Generator, dtype: torch.dtype, tokens: int, logits: bool) -> Case:
    wide = torch.randn(tokens, 250, generator=generator).to(dtype)
    weight = (torch.randn(70, 120, generator=generator) / 10).to(dtype)
    args = {
        "out": torch.empty(tokens, 90, dtype=torch.float32 if logits else dtype)[:, 5:75],
        "hidden" if logits else "input": wide[:, 33:133],
        "weight": weight[:, :100],
        "bias": torch.randn(70, generator=generator).to(dtype),
    }
    return Case(f"strided, {tokens} tokens", dtype, args)


def _cases(generator: torch.Generator, dtype: torch.dtype, logits: bool) -> Iterator[Case]:
    yield from (_case(generator, dtype, shape, logits) for shape in _SHAPES)
    yield from (_strided(generator, dtype, tokens, logits) for tokens in (1, 9, 120))


LINEAR = define(
    Op(
        name="linear",
        schema="(Tensor(a!) out, Tensor input, Tensor weight, Tensor? bias) -> ()",
        reference=_linear,
        cases=lambda generator, dtype: _cases(generator, dtype, logits=False),
    )
)
"""out = input · weightᵀ + bias, in one type, accumulated in float32.

``input``: [M, K] and ``out``: [M, N], rows may be strided. ``weight``: [N, K]. ``bias``: [N] or none.
"""

LOGITS = define(
    Op(
        name="logits",
        schema="(Tensor(a!) out, Tensor hidden, Tensor weight, Tensor? bias) -> ()",
        reference=_logits,
        cases=lambda generator, dtype: _cases(generator, dtype, logits=True),
        # Products of two bf16 or fp16 values are exact in float32, so nothing but the order of additions differs.
        tolerances={torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6},
    )
)
"""As linear, but ``out`` is float32 [M, V] whatever the type of ``hidden`` and ``weight``: logits are not rounded."""
