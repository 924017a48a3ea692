"""Sees the operators that torch runs, and the places where the host waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kunlun.emulator import placement, runtime
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.targets.p800.contract_load import load

# They make a tensor or another view of one; nothing is launched.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "alias",
        "_unsafe_view", "resize_", "set_", "sym_size", "sym_stride", "sym_numel", "is_same_size",
    )
)  # fmt: skip
_INDEXING = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))
MASKED_INDEX = "index with a boolean mask"
# Methods that bring values to the host; on a CPU tensor some of them reach no operator.
_TO_HOST = frozenset(
    ("cpu", "tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__")
)


@dataclass(frozen=True)
class TorchCall:
    """An operator of torch with its arguments."""

    function: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: runtime.CallKind = "torch"

    @property
    def name(self) -> str:
        """``aten::add``."""
        return operator_name(self.function)

    def run(self, replay: bool = False) -> Any:
        """Runs the operator; a collective, which a card orders on its stream, is over when this returns."""
        result = self.function(*self.args, **self.kwargs)
        if self.function.namespace == "c10d":
            wait_for(result)
        return result

    def captured(self) -> TorchCall:
        """Operators of torch run on the device only: there is nothing of the host to keep."""
        return self


def wait_for(result: tuple[Any, ...]) -> None:
    """Waits for the work that a collective's result comes with."""
    from torch._C._distributed_c10d import Work

    for item in result:
        if isinstance(item, torch.ScriptObject):
            Work.unbox(item).wait()


def operator_name(function: torch._ops.OpOverload) -> str:
    """``aten::add``, without the overload."""
    return str(function._schema.name)


class _Local(threading.local):
    counted = False


_local = _Local()


class _Operators(TorchDispatchMode):
    def __init__(self, observer: runtime.Observer, settings: Settings) -> None:
        super().__init__()
        self.observer = observer
        self.settings = settings
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if runtime.busy():
            return func(*args, **kwargs)
        if func.namespace != "aten":
            return self._custom(func, args, kwargs)
        # Some composite operators (contiguous, reshape) are called views and copy where they must.
        if func._can_decompose():
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        return self._aten(func, args, kwargs)

    def _custom(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Goes on inside a custom operator; one that shows nothing inside is itself the launch."""
        before = self.seen
        with self, _vendor_calls_counted(self):
            result = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        if self.seen == before:
            self._report(TorchCall(func, args, kwargs), result)
        return result

    def _aten(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if placement.on_host((args, kwargs)):
            result = func(*args, **kwargs)
            placement.keep_on_host(result)
            return result
        name = operator_name(func)
        sync = _sync_of(name, args, self.settings)
        if sync and not _local.counted:
            self.observer.on_sync(sync)
        result = func(*args, **kwargs)
        if not (func.is_view or name in _FREE or sync):
            self._report(TorchCall(func, args, kwargs), result)
        return result

    def _report(self, call: TorchCall, result: Any) -> None:
        self.seen += 1
        self.observer.on_call(call, result)


@contextmanager
def _vendor_calls_counted(mode: _Operators) -> Iterator[None]:
    """Vendor calls inside a custom operator count as something seen in it."""

    class Counter:
        def on_call(self, call: runtime.DeviceCall, result: Any) -> None:
            mode.seen += 1

        def on_sync(self, name: str) -> None:
            mode.seen += 1

    with runtime.observed_by(Counter()):
        yield


def _sync_of(name: str, args: tuple[Any, ...], settings: Settings) -> str | None:
    """What an operator makes the host wait for, or None."""
    if name in _INDEXING and any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1] or ()):
        return MASKED_INDEX
    rule = load().device_rules.get(name)
    if rule is None or (rule.fault is not None and rule.fault not in settings.faults):
        return None
    return name


class _Methods(TorchFunctionMode):
    """Sees the methods that bring values to the host."""

    def __init__(self, observer: runtime.Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if runtime.busy() or not _goes_to_host(func, args, kwargs) or placement.on_host(args[:1]):
            return func(*args, **kwargs)
        self.observer.on_sync(f"Tensor.{func.__name__}")
        _local.counted, before = True, _local.counted
        try:
            return func(*args, **kwargs)
        finally:
            _local.counted = before


def _goes_to_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "to":
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        return isinstance(target, str | torch.device) and torch.device(target).type == "cpu"
    return name in _TO_HOST


@contextmanager
def watched_by(observer: runtime.Observer, settings: Settings) -> Iterator[None]:
    """`observer` hears of vendor calls, of torch's operators and of host synchronisations until the block ends."""
    with runtime.observed_by(observer), _Methods(observer), _Operators(observer, settings):
        yield
