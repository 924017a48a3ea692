"""Which tensors stand for host memory: all of them are on the CPU here, so whoever makes one for the host says so.

What is not marked stands for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

# By the address of the storage's record, which stays taken while a weak reference to it is held.
_marked: dict[int, StorageWeakRef] = {}


def host(tensor: Tensor) -> Tensor:
    """Marks a tensor's memory as the host's, for all views of it too; returns the tensor."""
    for key in [key for key, reference in _marked.items() if reference.expired()]:
        del _marked[key]
    storage = tensor.untyped_storage()
    _marked[storage._cdata] = StorageWeakRef(storage)
    return tensor


def is_host(tensor: Tensor) -> bool:
    """Whether a tensor's memory was marked as the host's."""
    return bool(_marked) and tensor.untyped_storage()._cdata in _marked


def on_host(values: Iterable[Any]) -> bool:
    """Whether there are tensors among the arguments of a call, and all of them are the host's."""
    tensors = [value for value in tree_leaves(list(values)) if isinstance(value, Tensor)]
    return bool(tensors) and all(is_host(tensor) for tensor in tensors)


def keep_on_host(result: Any) -> None:
    """Marks what a call made of host tensors alone."""
    for value in tree_leaves(result):
        if isinstance(value, Tensor) and not is_host(value):
            host(value)
