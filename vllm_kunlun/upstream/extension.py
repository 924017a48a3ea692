"""Ops that vLLM calls on a `cuda` device and that its own compiled extension, which is not there, would define."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("vllm.kunlun")

_WEAK = "weak_ref_tensor"
_PENALTIES = "apply_repetition_penalties_"
SCHEMAS = {
    _WEAK: "(Tensor input) -> Tensor",
    _PENALTIES: "(Tensor(a!) logits, Tensor prompt_mask, Tensor output_mask, Tensor repetition_penalties) -> ()",
}


@cache
def _library() -> torch.library.Library:
    library = torch.library.Library("_C", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    return library


def _strong_reference(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape)


def weak_reference() -> Callable[[torch.Tensor], torch.Tensor]:
    """Over the same memory, without keeping it alive: the vendor's callable.

    Without it a strong reference, which costs the memory of the graphs' outputs.
    """
    found = getattr(torch.ops.xspeedgate_ops, _WEAK, None)
    if found is None:
        logger.info("xspeedgate_ops has no %s: graphs keep the memory of their outputs", _WEAK)
    return found or _strong_reference


def _repetition_penalties() -> Callable[..., None]:
    """vLLM's own version for tensors of other devices, in torch."""
    from vllm._custom_ops import apply_repetition_penalties_torch

    return apply_repetition_penalties_torch


def provide_extension_ops(dispatch_key: str) -> None:
    """Makes the ops work for tensors of the target; the vendor's libraries must be loaded."""
    implementations: dict[str, Callable[..., Any]] = {_WEAK: weak_reference(), _PENALTIES: _repetition_penalties()}
    for name, function in implementations.items():
        _library().impl(name, function, dispatch_key, allow_override=True)
