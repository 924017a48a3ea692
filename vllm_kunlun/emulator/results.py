"""Writes an emulated call's results: outputs are poisoned first, so that what a kernel leaves unwritten shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Partial, Result
from vllm_kunlun.emulator.shapes import Dimensions
from vllm_kunlun.targets.p800.contract import Returned


def poison(tensor: Tensor) -> None:
    """Fills a tensor with what no kernel computes: NaN, the least integer, or True."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def write(call: Call, results: Mapping[str, Result]) -> Any:
    """Writes the out arguments and gives back what the callable returns: None, a tensor, or a tuple of them."""
    for argument, tensor in call.tensors():
        if argument.io == "out":
            result = results[argument.name]
            poison(tensor)
            _copy(tensor, result)
    returned = tuple(_returned(call, one, results[one.name]) for one in call.op.returns)
    return returned[0] if len(returned) == 1 else returned or None


def _copy(tensor: Tensor, result: Result) -> None:
    if isinstance(result, Tensor):
        tensor.copy_(result.reshape(tensor.shape))
        return
    rows = result.mask.nonzero().flatten()
    value = result.value.reshape(tensor.shape).to(tensor.dtype)
    tensor.index_copy_(result.dim, rows, value.index_select(result.dim, rows))


def _returned(call: Call, returned: Returned, result: Result) -> Tensor:
    """A returned tensor in the table's dtype and shape; raises ShapeMismatch where the arithmetic is at fault."""
    if isinstance(result, Partial):
        raise TypeError(f"{call.op.name} returns {returned.name} whole, not some rows of it")
    dtype = _dtype(call, returned.dtypes[0])
    shapes = tuple(_shape(call, text) for text in returned.shapes)
    numbers = {name: value for name, value in call.names().items() if isinstance(value, int)}
    dimensions = Dimensions(numbers)
    dimensions.match(returned.name, tuple(result.shape), shapes)
    return result if result.dtype == dtype else result.to(dtype)


def _dtype(call: Call, name: str) -> torch.dtype:
    if name.startswith("as "):
        return call[name.removeprefix("as ")].dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _shape(call: Call, text: str) -> str:
    if text.startswith("as "):
        return ", ".join(str(size) for size in call[text.removeprefix("as ")].shape)
    return text
