"""The ``torch`` provider: the contract's references, or something faster from torch where it computes the same."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kunlun.ops import contract
from vllm_kunlun.ops.linear import torch_linear, torch_logits

_FASTER: dict[str, Callable[..., None]] = {"linear": torch_linear, "logits": torch_logits}


def implementation(name: str) -> Callable[..., None]:
    """The function that serves op `name` with plain torch, on any device."""
    return _FASTER.get(name) or contract.ops()[name].reference
