"""Graphs of the emulated device: a capture keeps the launches of a block, a replay runs them on the same memory.

Host tensors keep the values of the capture, as a kernel gets them when it is launched. What would wait for the device,
or go through the host, cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.emulator import runtime
from vllm_kunlun.emulator.results import poison
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.emulator.watch import TorchCall, watched_by


class CaptureError(RuntimeError):
    """Something in a capture cannot be part of a graph, or the graph is used out of order."""


@dataclass(frozen=True)
class _Node:
    call: runtime.DeviceCall
    result: Any


class Capture:
    """Keeps the calls of a block."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []

    def on_call(self, call: runtime.DeviceCall, result: Any) -> None:
        """Keeps a call and the tensors it made: a replay writes to the same ones."""
        if call.kind == "graph":
            raise CaptureError("a graph was replayed while another was captured")
        self.nodes.append(_Node(call.captured(), result))

    def on_sync(self, name: str) -> None:
        """Refuses what cannot be captured."""
        raise CaptureError(
            f"operation not permitted when stream is capturing: {name} waits for the device or goes through the host."
            " Do it before the capture."
        )

    def replay(self) -> None:
        """Runs the calls again."""
        with torch.inference_mode():
            for node in self.nodes:
                _write_back(node.result, node.call.run(replay=True))

    def poison_new(self) -> None:
        """Spoils what the calls made: a captured kernel has not run, and its results come with the first replay."""
        with torch.inference_mode():
            for node in self.nodes:
                for tensor in _new_tensors(node):
                    poison(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _write_back(captured: Any, fresh: Any) -> None:
    """Copies new results over those that the capture made; results that are views of an argument are there already."""
    for old, new in zip(_tensors(captured), _tensors(fresh), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _new_tensors(node: _Node) -> list[Tensor]:
    """Results whose memory belongs to none of the call's arguments."""
    if not isinstance(node.call, TorchCall):
        return []
    owned = {t.untyped_storage().data_ptr() for t in _tensors((*node.call.args, *node.call.kwargs.values()))}
    results = [tensor for tensor in _tensors(node.result) if not tensor.is_complex()]
    return [tensor for tensor in results if tensor.untyped_storage().data_ptr() not in owned]


@dataclass(frozen=True)
class _Replay:
    capture: Capture
    name: str = "graph replay"
    kind: runtime.CallKind = "graph"

    def run(self, replay: bool = False) -> None:
        self.capture.replay()

    def captured(self) -> _Replay:
        return self


_capturing: list[EmulatedGraph] = []


def is_capturing() -> bool:
    """Whether a graph is being captured."""
    return bool(_capturing)


class EmulatedGraph:
    """Has the methods of torch.cuda.CUDAGraph that vLLM and this plugin use."""

    settings = Settings()

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._stack = ExitStack()
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        """Starts keeping calls."""
        if _capturing:
            raise CaptureError("a capture is under way on this device already")
        self._capture, self._pool = Capture(), pool
        _capturing.append(self)
        self._stack.enter_context(watched_by(self._capture, self.settings))

    def capture_end(self) -> None:
        """Stops keeping calls."""
        if self not in _capturing or self._capture is None:
            raise CaptureError("capture_end without capture_begin")
        _capturing.remove(self)
        self._stack.close()
        self._capture.poison_new()

    def abandon(self) -> None:
        """Ends a capture that failed."""
        if self in _capturing:
            _capturing.remove(self)
        self._stack.close()
        self._capture = None

    def replay(self) -> None:
        """Runs the captured calls; raises CaptureError where there are none."""
        if self._capture is None or self in _capturing:
            raise CaptureError("replay of a graph that was not captured")
        runtime.submit(_Replay(self._capture))

    def reset(self) -> None:
        """Forgets the captured calls."""
        self._capture = None

    def pool(self) -> tuple[int, int]:
        """The memory pool, of which there is only a number here."""
        return self._pool or (0, id(self))

    def __len__(self) -> int:
        return len(self._capture.nodes) if self._capture else 0


class EmulatedGraphContext:
    """Stands in for torch.cuda.graph, the context of a capture."""

    def __init__(
        self,
        cuda_graph: EmulatedGraph,
        pool: tuple[int, int] | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.graph = cuda_graph
        self.pool = pool

    def __enter__(self) -> None:
        self.graph.capture_begin(self.pool)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.graph.capture_end()
        else:
            self.graph.abandon()
