"""Activation functions of feed-forward layers, alone and gated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define

GELU_KINDS = ("none", "tanh", "new", "fast", "quick")


def _silu_and_mul(out: Tensor, input: Tensor) -> None:
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def _gelu_and_mul(out: Tensor, input: Tensor, tanh: bool) -> None:
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh" if tanh else "none") * up)


def _gelu(out: Tensor, input: Tensor, kind: str) -> None:
    x = input.float()
    if kind not in GELU_KINDS:
        raise ValueError(f"gelu: there is no kind {kind!r}; it must be one of {', '.join(GELU_KINDS)}")
    if kind == "quick":
        out.copy_(x * torch.sigmoid(1.702 * x))
    else:
        out.copy_(F.gelu(x, approximate="none" if kind == "none" else "tanh"))


def _swiglu_oai(out: Tensor, input: Tensor, alpha: float, limit: float) -> None:
    gate, up = input.float()[..., ::2], input.float()[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((up + 1) * gate * torch.sigmoid(alpha * gate))


_SHAPES = ((1, 1536), (0, 64), (7, 33), (3, 5, 40), (130, 257), (1, 1), (2, 4099))


def _input(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    # Wide enough for the saturated ends of every function; the first column is positive, because a relative error over
    # saturated values alone means nothing.
    x = 4 * torch.randn(shape, generator=generator)
    x[..., 0].abs_()
    return x.to(dtype)


def _cases(generator: torch.Generator, dtype: torch.dtype, width: int, **rest: object) -> Iterator[Case]:
    """Cases of an op that makes one element of out from `width` elements of input."""
    note = " ".join(str(value) for value in rest.values())
    for shape in _SHAPES:
        x = _input((*shape[:-1], width * shape[-1]), generator, dtype)
        yield Case(f"{shape} {note}", dtype, {"out": torch.empty(shape, dtype=dtype), "input": x, **rest})
    x = _input((9, 3 * width * 40), generator, dtype)[:, width * 40 : 2 * width * 40]
    out = torch.empty(9, 64, dtype=dtype)[:, :40]
    yield Case(f"strided rows {note}", dtype, {"out": out, "input": x, **rest})


def _gelu_and_mul_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tanh in (False, True):
        yield from _cases(generator, dtype, 2, tanh=tanh)


def _gelu_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for kind in GELU_KINDS:
        yield from _cases(generator, dtype, 1, kind=kind)


SILU_AND_MUL = define(
    Op(
        name="silu_and_mul",
        schema="(Tensor(a!) out, Tensor input) -> ()",
        reference=_silu_and_mul,
        cases=lambda generator, dtype: _cases(generator, dtype, 2),
    )
)
"""out[..., c] = silu(input[..., c]) · input[..., C + c]; input: [..., 2C], out: [..., C] (Shazeer, 2020)."""

GELU_AND_MUL = define(
    Op(
        name="gelu_and_mul",
        schema="(Tensor(a!) out, Tensor input, bool tanh) -> ()",
        reference=_gelu_and_mul,
        cases=_gelu_and_mul_cases,
    )
)
"""out[..., c] = gelu(input[..., c]) · input[..., C + c], exact or with the tanh approximation."""

GELU = define(
    Op(
        name="gelu",
        schema="(Tensor(a!) out, Tensor input, str kind) -> ()",
        reference=_gelu,
        cases=_gelu_cases,
    )
)
"""Elementwise GELU (Hendrycks and Gimpel, 2016).

``kind``: ``none`` is x·Φ(x); ``tanh``, ``new`` and ``fast`` are one function, the tanh approximation, under the names
that checkpoints use; ``quick`` is x·sigmoid(1.702x). Another name is an error.
"""

SWIGLU_OAI = define(
    Op(
        name="swiglu_oai",
        schema="(Tensor(a!) out, Tensor input, float alpha, float limit) -> ()",
        reference=_swiglu_oai,
        cases=lambda generator, dtype: _cases(generator, dtype, 2, alpha=1.702, limit=7.0),
    )
)
"""The gate of gpt-oss: gate = input[..., 2c], up = input[..., 2c + 1], both clamped (gate from above only),
out[..., c] = (up + 1) · gate · sigmoid(alpha · gate)."""
