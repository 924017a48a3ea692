"""The op that vLLM's graph wrapper asks for: a tensor over the same memory that does not keep it alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

logger = logging.getLogger("vllm.kunlun")

_NAME = "weak_ref_tensor"


@cache
def _library() -> torch.library.Library:
    """vLLM's compiled extension, which is not there, would define it under this name."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(f"{_NAME}(Tensor input) -> Tensor")
    return library


def _strong(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape)


def implementation() -> Callable[[torch.Tensor], torch.Tensor]:
    """The vendor's callable; without it a strong reference, which costs the memory of the graphs' outputs."""
    found = getattr(torch.ops.xspeedgate_ops, _NAME, None)
    if found is None:
        logger.info("xspeedgate_ops has no %s: graphs keep the memory of their outputs", _NAME)
    return found or _strong


def provide_weak_references(dispatch_key: str) -> None:
    """Makes `torch.ops._C.weak_ref_tensor` work for tensors of the target."""
    _library().impl(_NAME, implementation(), dispatch_key, allow_override=True)
