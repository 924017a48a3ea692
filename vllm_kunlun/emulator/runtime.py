"""What runs on the emulated device passes through here, so that launches can be counted and graphs captured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

CallKind = Literal["vendor", "torch", "graph"]


class DeviceCall(Protocol):
    """Something that is launched on the device."""

    @property
    def name(self) -> str:
        """What is launched."""

    @property
    def kind(self) -> CallKind:
        """Whether the vendor's library, torch or a graph launches it."""

    def run(self, replay: bool = False) -> Any:
        """Computes it now and gives back its result."""

    def captured(self) -> DeviceCall:
        """The call as a graph keeps it: with the values that host tensors have now."""


class Observer(Protocol):
    """Follows what is launched."""

    def on_call(self, call: DeviceCall, result: Any) -> None:
        """A call was launched."""

    def on_sync(self, name: str) -> None:
        """The host waited for the device, or data went through the host."""


class _Local(threading.local):
    depth = 0


_local = _Local()
_observers: list[Observer] = []


def busy() -> bool:
    """Whether this thread is inside an emulated kernel, whose own work is nobody's launch."""
    return _local.depth > 0


@contextmanager
def suspended() -> Iterator[None]:
    """Nothing that runs inside is a launch or a synchronisation."""
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """`observer` hears of every call until the block ends."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def submit(call: DeviceCall) -> Any:
    """Runs a call and tells the observers of it."""
    with suspended():
        result = call.run()
    announce(call, result)
    return result


def announce(call: DeviceCall, result: Any) -> None:
    """Tells the observers of a call that has run; what they do about it is no call."""
    if not busy():
        with suspended():
            for observer in tuple(_observers):
                observer.on_call(call, result)


def synchronise(name: str) -> None:
    """Tells the observers that the host waits for the device."""
    if not busy():
        for observer in tuple(_observers):
            observer.on_sync(name)
