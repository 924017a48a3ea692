"""The ``torch`` provider: the contract's references, or something faster from torch where it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_kunlun.ops import contract


def _linear(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(torch.nn.functional.linear(input, weight, bias))


_FASTER: dict[str, Callable[..., None]] = {"linear": _linear}


def implementation(name: str) -> Callable[..., None]:
    """The function that serves op `name` with plain torch, on any device."""
    return _FASTER.get(name) or contract.ops()[name].reference
