"""The part of torch.cuda and of torch.accelerator that a driver of the P800 uses, on CPU tensors.

xpytorch shows the card as a CUDA device; these functions give its answers. Sources: public notes of runs on P800 cards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kunlun.emulator import runtime, streams
from vllm_kunlun.emulator.device_memory import DeviceMemory
from vllm_kunlun.emulator.graph import EmulatedGraph, EmulatedGraphContext, is_capturing
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.platforms import envs

CARDS = 8
CLUSTERS = 12
NAME = "GPU"
CAPABILITY = (8, 6)
_VISIBLE = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class DeviceProperties:
    """What torch.cuda.get_device_properties says of a P800; memory in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


class _Current(threading.local):
    index = 0


class EmulatedDevice:
    """One machine with cards; the current card belongs to a thread and starts at 0."""

    def __init__(self, settings: Settings, memory_bytes: int, environ: Mapping[str, str] | None = None) -> None:
        self.memory = DeviceMemory.start(memory_bytes)
        self.environ = os.environ if environ is None else environ
        self._current = _Current()
        self._chosen = False
        # One class for each device, as a graph is made without being told which device it belongs to.
        self.graph_class = type("CUDAGraph", (EmulatedGraph,), {"settings": settings})

    def device_count(self) -> int:
        """Cards this process may use; raises RuntimeError where the two variables disagree."""
        lists = [self.environ[name] for name in _VISIBLE if self.environ.get(name)]
        if len(set(lists)) > 1:
            raise RuntimeError(
                f"{_VISIBLE[0]}={lists[0]} and {_VISIBLE[1]}={lists[1]} name different cards; set both equal"
            )
        return len(lists[0].split(",")) if lists else CARDS

    def current_device(self) -> int:
        """This thread's card."""
        return self._current.index

    def set_device(self, device: Any) -> None:
        """Changes this thread's card; raises RuntimeError for one that is not there.

        What the process took before it first chose a card is not the card's.
        """
        index = self._index(device)
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}; there are {self.device_count()} devices")
        self._current.index = index
        if not self._chosen:
            self._chosen = True
            self.memory.restart()

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return self._current.index if index is None else index

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`device` is this thread's card until the block ends."""
        before = self._current.index
        self.set_device(device)
        try:
            yield
        finally:
            self._current.index = before

    def properties(self, device: Any = None) -> DeviceProperties:
        """Properties of a card."""
        return DeviceProperties(NAME, *CAPABILITY, self.memory.total, CLUSTERS)

    def synchronize(self, device: Any = None) -> None:
        """Everything has run already; counts as a synchronisation."""
        runtime.synchronise("torch.cuda.synchronize")

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the members of torch.cuda."""
        return {**self._identity(), **self._memory(), **self._execution()}

    def accelerator_functions(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the members of torch.accelerator, which stands for torch.cuda on such a machine.

        `is_available` and `current_accelerator` are left alone: torch itself asks them to place tensors.
        """
        memory = self._memory()
        same = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats")
        return {
            **{name: memory[name] for name in (*same, "reset_peak_memory_stats", "empty_cache")},
            "get_memory_info": memory["mem_get_info"],
            "device_count": self.device_count,
            "current_device_index": self.current_device,
            "set_device_index": self.set_device,
            "device_index": self.device,
            "synchronize": self.synchronize,
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
        }

    def _identity(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": self.device_count,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device": self.device,
            "get_device_name": lambda device=None: NAME,
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_properties": self.properties,
        }

    def _memory(self) -> dict[str, Callable[..., Any]]:
        memory = self.memory
        return {
            "mem_get_info": lambda device=None: (memory.free(), memory.total),
            "memory_allocated": lambda device=None: memory.allocated(),
            "max_memory_allocated": lambda device=None: memory.peak_allocated(),
            "memory_reserved": lambda device=None: memory.allocated(),
            "max_memory_reserved": lambda device=None: memory.peak_allocated(),
            "memory_stats": lambda device=None: memory.stats(),
            "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
            "empty_cache": lambda: None,
        }

    def _execution(self) -> dict[str, Callable[..., Any]]:
        return {
            "synchronize": self.synchronize,
            "Stream": streams.EmulatedStream,
            "Event": streams.EmulatedEvent,
            "stream": streams.stream_context,
            "current_stream": streams.current_stream,
            "default_stream": streams.default_stream,
            "set_stream": streams.set_stream,
            "CUDAGraph": self.graph_class,
            "graph": EmulatedGraphContext,
            "graph_pool_handle": lambda: (0, 1),
            "is_current_stream_capturing": is_capturing,
            # torch.manual_seed has seeded the CPU's generator, which draws for this device.
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
        }


def emulated_device(settings: Settings) -> EmulatedDevice:
    """A machine with as much memory per card as VLLM_KUNLUN_EMULATOR_MEMORY_GIB says."""
    return EmulatedDevice(settings, envs.EMULATOR_MEMORY_GIB.get() * 2**30)
