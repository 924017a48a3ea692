"""Installs the emulator in this process, and takes it out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from vllm_kunlun.emulator import linear
from vllm_kunlun.emulator import numerics as _numerics  # noqa: F401  registers the arithmetic
from vllm_kunlun.emulator.device import EmulatedDevice, emulated_device
from vllm_kunlun.emulator.dispatcher import DispatcherLibrary
from vllm_kunlun.emulator.launch_record import LaunchRecord, guarded, recorded
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.emulator.streams import EmulatedEvent
from vllm_kunlun.emulator.vendor import vendor_callable
from vllm_kunlun.targets.p800.contract import VendorOp
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.upstream.stand_in import StandIns

# Libraries that are imported for what they do at import only.
_EMPTY_MODULES = ("cocopod",)


class EmulatorStateError(RuntimeError):
    """The emulator was installed twice, or used without being installed."""


@dataclass
class Session:
    """An installed emulator."""

    settings: Settings
    device: EmulatedDevice | None
    stand_ins: StandIns
    libraries: list[DispatcherLibrary]

    def close(self) -> None:
        """Puts everything back."""
        self.stand_ins.undo()
        while self.libraries:
            self.libraries.pop().close()


_sessions: list[Session] = []


def install(settings: Settings | None = None, device: bool = True) -> Session:
    """Makes `kunlun_ops`, `xspeedgate_ops`, `cocopod` and, with `device`, torch's device and linear the emulator's.

    Without `settings` the environment variables decide. Raises EmulatorStateError when it is installed already.
    """
    if _sessions:
        raise EmulatorStateError("the emulator is installed already; call vllm_kunlun.emulator.uninstall() first")
    settings = settings or Settings.from_environment()
    session = Session(settings, emulated_device(settings) if device else None, StandIns(), [])
    _sessions.append(session)
    try:
        _install_libraries(session)
        _install_device(session)
    except BaseException:
        uninstall()
        raise
    return session


def uninstall() -> None:
    """Takes the emulator out; does nothing where it is not installed."""
    while _sessions:
        _sessions.pop().close()


def current() -> Session:
    """The installed emulator; raises EmulatorStateError without one."""
    if not _sessions:
        raise EmulatorStateError("the emulator is not installed; call vllm_kunlun.emulator.install() first")
    return _sessions[-1]


@contextmanager
def running(
    generation: str = "torch29", faults: Iterable[str] = (), missing: Iterable[str] = (), device: bool = True
) -> Iterator[Session]:
    """The emulator is installed until the block ends; the arguments are what the environment variables hold."""
    session = install(Settings.of(generation, faults, missing), device)
    try:
        yield session
    finally:
        uninstall()


def launches() -> AbstractContextManager[LaunchRecord]:
    """A context that records what a block launches and where the host waits for the device.

    Tensors stand for the device's unless `host` marked them: mark what the host may read inside.
    """
    return recorded(current().settings)


def guard() -> AbstractContextManager[None]:
    """A context in which a host synchronisation, or an operator without a device kernel, raises HostRoundTrip."""
    return guarded(current().settings)


def _present(settings: Settings) -> list[VendorOp]:
    ops = load().in_generation(settings.generation)
    return [op for op in ops if op.name not in settings.missing]


def _install_libraries(session: Session) -> None:
    contract = load()
    wheels = contract.generations[session.settings.generation].wheels
    present = _present(session.settings)
    for name in sorted({op.library for op in present} - {"torch"}):
        ops = [op for op in present if op.library == name]
        module = ModuleType(name, f"Emulated {wheels[name]}.")
        if name in contract.dispatched:
            session.libraries.append(DispatcherLibrary(name, ops, session.settings, session.stand_ins))
        else:
            vars(module).update({op.callable_name: vendor_callable(op, session.settings) for op in ops})
        session.stand_ins.module(name, module)
    for name in _EMPTY_MODULES:
        session.stand_ins.module(name, ModuleType(name, f"Emulated {wheels[name]}."))


def _install_device(session: Session) -> None:
    if session.device is None:
        return
    for name, member in session.device.functions().items():
        session.stand_ins.attribute(torch.cuda, name, member)
    for name, member in session.device.accelerator_functions().items():
        if hasattr(torch.accelerator, name):  # not all releases of torch have all of them
            session.stand_ins.attribute(torch.accelerator, name, member)
    session.stand_ins.attribute(torch, "Event", EmulatedEvent)
    functional = torch.nn.functional
    original = functional.linear
    session.stand_ins.attribute(functional, "linear", linear.stand_in(original, session.settings))
