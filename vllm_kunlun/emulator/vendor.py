"""Callables with the vendor's names and signatures, made from the contract table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm_kunlun.emulator import runtime
from vllm_kunlun.emulator.call import Call, Numerics
from vllm_kunlun.emulator.checks import CHECKS
from vllm_kunlun.emulator.refusal import NotEmulatedYet
from vllm_kunlun.emulator.results import write
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.targets.p800.contract import REQUIRED, Argument, VendorOp
from vllm_kunlun.targets.p800.contract_load import load

_NUMERICS: dict[str, Numerics] = {}


def emulates(name: str) -> Callable[[Numerics], Numerics]:
    """Makes a function the arithmetic of a callable of the table."""
    load().op(name)

    def register(numerics: Numerics) -> Numerics:
        if name in _NUMERICS:
            raise ValueError(f"{name} is emulated twice")
        _NUMERICS[name] = numerics
        return numerics

    return register


def emulated() -> frozenset[str]:
    """Names of the callables whose arithmetic is written."""
    return frozenset(_NUMERICS)


@dataclass(frozen=True)
class VendorCall:
    """A bound call of an emulated callable."""

    op: VendorOp
    settings: Settings
    values: Mapping[str, Any]
    kind: runtime.CallKind = "vendor"

    @property
    def name(self) -> str:
        """The callable's full name."""
        return self.op.name

    def run(self, replay: bool = False) -> Any:
        """Checks the call, computes it and writes its results."""
        call = Call(self.op, self.settings, dict(self.values), replay)
        for check in CHECKS:
            check(call)
        return write(call, _NUMERICS[self.op.name](call))

    def captured(self) -> VendorCall:
        """The call with copies of its host tensors: a kernel gets those when it is launched, not in a replay."""
        values = dict(self.values)
        for argument in self.op.arguments_in(self.settings.generation):
            value = values[argument.name]
            if argument.place == "host" and isinstance(value, Tensor):
                values[argument.name] = value.clone()
        return VendorCall(self.op, self.settings, values, self.kind)


def parameters(op: VendorOp, settings: Settings) -> dict[str, Argument]:
    """The arguments that the callable has in this stack, by the keyword it has there."""
    absent = {f.argument for f in op.faults if f.kind == "absent keyword" and settings.active(f)}
    arguments = op.arguments_in(settings.generation)
    return {a.keyword(settings.generation): a for a in arguments if a.name not in absent}


def signature(op: VendorOp, settings: Settings) -> inspect.Signature:
    """The callable's signature in this stack; raises ValueError where only the name is known."""
    if op.arguments is None:
        raise ValueError(f"the arguments of {op.name} are not known")
    found = []
    by_keyword = False
    for keyword, argument in parameters(op, settings).items():
        by_keyword = by_keyword or argument.name == op.keywords_from
        kind = inspect.Parameter.KEYWORD_ONLY if by_keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append(inspect.Parameter(keyword, kind, default=_default(op, argument, settings)))
    return inspect.Signature(found)


def _default(op: VendorOp, argument: Argument, settings: Settings) -> Any:
    for fault in op.faults:
        if fault.kind == "default" and fault.argument == argument.name and settings.active(fault):
            return fault.default
    return inspect.Parameter.empty if argument.default is REQUIRED else argument.default


def vendor_callable(op: VendorOp, settings: Settings) -> Callable[..., Any]:
    """The function that stands in for a callable of the vendor's library."""
    if op.arguments is None:
        return _refusing(op, "only its name is known, not its arguments")
    bound = signature(op, settings)
    by_keyword = parameters(op, settings)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = bound.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{op.name}(): {error}") from None
        if op.name not in _NUMERICS:
            raise NotEmulatedYet(op.name)
        given.apply_defaults()
        values = {by_keyword[keyword].name: value for keyword, value in given.arguments.items()}
        # A keyword that this stack lacks has the value that stands for its absence.
        absent = {a.name: a.default for a in op.arguments_in(settings.generation) if a.name not in values}
        return runtime.submit(VendorCall(op, settings, {**values, **absent}))

    return _named(call, op, bound)


def _refusing(op: VendorOp, why: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotEmulatedYet(op.name, why)

    return _named(call, op, None)


def _named(call: Callable[..., Any], op: VendorOp, bound: inspect.Signature | None) -> Callable[..., Any]:
    call.__name__ = call.__qualname__ = op.callable_name
    call.__doc__ = op.computes
    if bound is not None:
        call.__signature__ = bound  # type: ignore[attr-defined]
    return call
