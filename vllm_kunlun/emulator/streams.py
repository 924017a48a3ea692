"""Streams and events of the emulated device, which does everything at once: they order nothing, but keep the rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_kunlun.emulator import runtime


class EmulatedStream:
    """Has the methods of torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = device
        self.priority = priority

    def synchronize(self) -> None:
        """Everything has run already; counts as a synchronisation."""
        runtime.synchronise("Stream.synchronize")

    def query(self) -> bool:
        """Everything has run already."""
        return True

    def wait_stream(self, stream: EmulatedStream) -> None:
        """Everything of the other stream has run already."""

    def wait_event(self, event: EmulatedEvent) -> None:
        """Everything before the event has run already."""

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        """Marks the present moment."""
        event = event or EmulatedEvent()
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        """The handle that custom kernels take."""
        return id(self)


class EmulatedEvent:
    """Has the methods of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._seconds: float | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Marks the present moment."""
        self._seconds = time.perf_counter()

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Everything before the event has run already."""

    def query(self) -> bool:
        """Everything has run already."""
        return True

    def synchronize(self) -> None:
        """Everything has run already; counts as a synchronisation."""
        runtime.synchronise("Event.synchronize")

    def elapsed_time(self, end_event: EmulatedEvent) -> float:
        """Milliseconds between two events; raises RuntimeError where they keep no time or were not recorded."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("elapsed_time was asked of events made without enable_timing=True")
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("elapsed_time was asked of an event that was not recorded")
        return (end_event._seconds - self._seconds) * 1e3


class _Current(threading.local):
    stream: EmulatedStream | None = None


_DEFAULT = EmulatedStream()
_current = _Current()


def default_stream(device: Any = None) -> EmulatedStream:
    """The stream that work goes to without any other; one per process and device."""
    return _DEFAULT


def current_stream(device: Any = None) -> EmulatedStream:
    """This thread's stream."""
    return _current.stream or _DEFAULT


def set_stream(stream: EmulatedStream | None) -> None:
    """Changes this thread's stream."""
    _current.stream = stream


@contextmanager
def stream_context(stream: EmulatedStream | None) -> Iterator[None]:
    """This thread's work goes to `stream` until the block ends; None changes nothing."""
    before = _current.stream
    set_stream(stream or before)
    try:
        yield
    finally:
        set_stream(before)
