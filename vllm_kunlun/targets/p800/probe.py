"""What the installed vendor libraries really have: callables and keywords, compared with the vendor contract.

Python callables are asked with `inspect.signature`, operators through the dispatcher's schemas. Nothing is called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_kunlun.platforms import envs
from vllm_kunlun.targets.p800.contract import Argument, Contract, Generation, Presence, VendorOp
from vllm_kunlun.targets.p800.contract_load import load

DifferenceKind = Literal["absent", "absent keyword", "other keyword", "unknown keyword", "not checked"]


class MissingVendorOps(RuntimeError):
    """Callables that the configuration needs are not installed."""


class UnknownStack(RuntimeError):
    """The installed torch belongs to no known generation of the vendor's libraries."""


@dataclass(frozen=True)
class Found:
    """An installed callable; `keywords` in order, None where it does not tell."""

    function: Callable[..., Any]
    keywords: tuple[str, ...] | None


@dataclass(frozen=True)
class Difference:
    """One way in which an installed callable is not what the contract says."""

    op: str
    kind: DifferenceKind
    detail: str

    def __str__(self) -> str:
        return f"{self.op}: {self.detail}"


@dataclass(frozen=True)
class VendorStack:
    """The installed libraries. `broken` has the error of each library that cannot be imported."""

    contract: Contract
    generation: Generation
    found: Mapping[str, Found]
    broken: Mapping[str, str]

    def has(self, name: str) -> bool:
        """Whether a callable is installed; raises UnknownVendorName for one that the contract does not have."""
        return self.contract.op(name).name in self.found

    def function(self, name: str) -> Callable[..., Any]:
        """The installed callable; raises MissingVendorOps without it."""
        self.require([name])
        return self.found[name].function

    def keyword(self, name: str, argument: str) -> str | None:
        """The keyword by which the installed callable takes an argument of the contract; None where it has none."""
        entry = self.contract.op(name).argument(argument)
        keywords = self.found[name].keywords if self.has(name) else None
        if keywords is None:
            return entry.keyword(self.generation)
        return next((keyword for keyword in _spellings(entry, self.generation) if keyword in keywords), None)

    def missing(self, required: Iterable[str]) -> tuple[VendorOp, ...]:
        """The required callables that are not installed."""
        ops = (self.contract.op(name) for name in dict.fromkeys(required))
        return tuple(op for op in ops if op.name not in self.found)

    def require(self, required: Iterable[str]) -> None:
        """Raises MissingVendorOps with all that are not installed, each with the wheel that has it."""
        missing = self.missing(required)
        if missing:
            lines = "\n".join(f"  {op.name}: {self._advice(op)}" for op in missing)
            raise MissingVendorOps(
                f"{len(missing)} vendor ops that this configuration needs are not installed:\n{lines}"
            )

    def _advice(self, op: VendorOp) -> str:
        if op.library in self.broken:
            return f"{op.library} cannot be imported: {self.broken[op.library]}"
        if self.generation not in op.presence:
            homes = ", ".join(sorted(generation.value for generation in op.presence))
            return f"the {self.generation.value} stack does not have it, only {homes}"
        some = " (not every build of it)" if op.presence[self.generation] is Presence.SOME_WHEELS else ""
        instead = f"; without it: {'; '.join(op.alternatives)}" if op.alternatives else ""
        return f"install {self.contract.wheel(op, self.generation)}{some}{instead}"

    def differences(self) -> tuple[Difference, ...]:
        """Every difference between the contract and what is installed."""
        return tuple(d for op in self.contract.in_generation(self.generation) for d in self._differences(op))

    def _differences(self, op: VendorOp) -> Iterable[Difference]:
        if op.name not in self.found:
            yield Difference(op.name, "absent", self._advice(op))
            return
        keywords = self.found[op.name].keywords
        if op.arguments is None or keywords is None:
            shown = "its arguments are not known" if keywords is None else f"its arguments are {', '.join(keywords)}"
            yield Difference(op.name, "not checked", shown)
            return
        yield from self._keyword_differences(op, keywords)

    def _keyword_differences(self, op: VendorOp, keywords: tuple[str, ...]) -> Iterable[Difference]:
        used = set()
        for argument in op.arguments_in(self.generation):
            expected, actual = argument.keyword(self.generation), self.keyword(op.name, argument.name)
            used.add(actual)
            if actual is None:
                yield Difference(op.name, "absent keyword", f"it has no argument {expected}")
            elif actual != expected:
                yield Difference(op.name, "other keyword", f"it calls {expected} {actual}")
        for stranger in (keyword for keyword in keywords if keyword not in used):
            yield Difference(op.name, "unknown keyword", f"its argument {stranger} is not in the contract")


def _spellings(argument: Argument, generation: Generation) -> Iterable[str]:
    """The keywords an argument may have: this generation's first, then those of others."""
    return dict.fromkeys((argument.keyword(generation), argument.name, *argument.names.values()))


def generation_here(emulated: bool) -> Generation:
    """The generation that VLLM_KUNLUN_EMULATOR_GENERATION names, or that the installed torch belongs to.

    Raises UnknownStack.
    """
    import torch

    if emulated:
        return Generation(envs.EMULATOR_GENERATION.get())
    generation = load().generation_of(torch.__version__)
    if generation is None:
        known = ", ".join(facts.torch for facts in load().generations.values())
        raise UnknownStack(f"torch {torch.__version__} is installed; the vendor's libraries are for torch {known}")
    return generation


def probe(generation: Generation, contract: Contract | None = None) -> VendorStack:
    """Looks at what is installed. Imports the vendor's libraries and torch."""
    contract = contract or load()
    broken: dict[str, str] = {}
    found: dict[str, Found] = {}
    for library in sorted({op.library for op in contract.ops.values()}):
        problem = _import(library)
        if problem:
            broken[library] = problem
            continue
        for op in contract.ops.values():
            entry = _find(op, dispatched=library in contract.dispatched) if op.library == library else None
            if entry is not None:
                found[op.name] = entry
    return VendorStack(contract, generation, found, broken)


def _import(library: str) -> str | None:
    """Imports a library; returns why that failed: it is not installed, or a symbol in it is not defined."""
    try:
        importlib.import_module(library)
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _find(op: VendorOp, dispatched: bool) -> Found | None:
    if dispatched:
        return _find_operator(op)
    holder: Any = importlib.import_module(op.library)
    for part in op.callable_name.split("."):
        holder = getattr(holder, part, None)
    return None if holder is None else Found(holder, _python_keywords(holder))


def _find_operator(op: VendorOp) -> Found | None:
    import torch

    packet = getattr(getattr(torch.ops, op.library), op.callable_name, None)
    if packet is None:
        return None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return Found(packet, None)
    # A packet without a default overload is asked for its first one.
    overload = getattr(packet, "default", None) or getattr(packet, packet.overloads()[0])
    return Found(packet, tuple(argument.name for argument in overload._schema.arguments))


def _python_keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Keywords of a Python function; None for a compiled one that does not tell, or one that takes anything."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)
