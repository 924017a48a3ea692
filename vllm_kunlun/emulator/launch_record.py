"""Counts what a piece of code launches on the device, and where the host waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_kunlun.emulator import runtime
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.emulator.watch import watched_by
from vllm_kunlun.targets.p800.contract_load import load


@dataclass(frozen=True)
class Launch:
    """One launch: ``kunlun_ops.rmsnorm`` of the vendor, ``aten::add`` of torch, or the replay of a graph."""

    name: str
    kind: runtime.CallKind


@dataclass
class LaunchRecord:
    """What was launched, in order, and the host synchronisations by name."""

    launches: list[Launch] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of all launches in order."""
        return [launch.name for launch in self.launches]

    @property
    def vendor(self) -> list[str]:
        """Names of the vendor's launches in order."""
        return [launch.name for launch in self.launches if launch.kind == "vendor"]

    @property
    def torch(self) -> list[str]:
        """Names of torch's own operators in order: each costs a launch as well."""
        return [launch.name for launch in self.launches if launch.kind == "torch"]

    def on_call(self, call: runtime.DeviceCall, result: Any) -> None:
        """Notes a launch."""
        self.launches.append(Launch(call.name, call.kind))

    def on_sync(self, name: str) -> None:
        """Notes a synchronisation."""
        self.syncs.append(name)


class HostRoundTrip(RuntimeError):
    """Code that must stay on the device waited for it, or went through the host."""

    def __init__(self, name: str) -> None:
        rule = load().device_rules.get(name)
        instead = f"; use instead: {rule.instead}" if rule else ""
        super().__init__(f"{name} makes the host wait for the device, or has no kernel there{instead}")


class Guard:
    """Raises HostRoundTrip where something is reached that the contract's device rules forbid in a step."""

    def on_call(self, call: runtime.DeviceCall, result: Any) -> None:
        """Launches are allowed."""

    def on_sync(self, name: str) -> None:
        """Synchronisations are not."""
        raise HostRoundTrip(name)


@contextmanager
def guarded(settings: Settings) -> Iterator[None]:
    """Nothing in the block may synchronise with the host; raises HostRoundTrip at the place that does."""
    with watched_by(Guard(), settings):
        yield


@contextmanager
def recorded(settings: Settings) -> Iterator[LaunchRecord]:
    """Records the block's launches and host synchronisations on a device with these settings."""
    record = LaunchRecord()
    with watched_by(record, settings):
        yield record
