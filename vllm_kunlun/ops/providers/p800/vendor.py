"""What an op of this provider is made from: the installed vendor callables, their limits, and answers about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kunlun.targets.p800.contract import KnownFault
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.probe import VendorStack
from vllm_kunlun.targets.p800.questions import Answers

Implementation = Callable[..., None]


class Refused(ValueError):
    """A call of an op that the vendor's kernels cannot serve; the message says why."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(f"{op} on the P800: {why}")


@dataclass(frozen=True)
class Vendor:
    """The installed callables, and what was found out about them at start."""

    stack: VendorStack
    answers: Answers

    def function(self, name: str) -> Callable[..., Any]:
        """An installed callable that takes the contract's argument names; raises MissingVendorOps without it.

        Callers give arguments by position up to the table's ``keywords_from``, and by keyword from there on.
        """
        function = self.stack.function(name)
        arguments = self.stack.contract.op(name).arguments_in(self.stack.generation)
        keywords = {argument.name: self.stack.keyword(name, argument.name) for argument in arguments}
        renamed = {ours: theirs for ours, theirs in keywords.items() if theirs not in (None, ours)}
        if not renamed:
            return function
        return lambda *args, **kwargs: function(*args, **{renamed.get(key, key): kwargs[key] for key in kwargs})

    def has(self, name: str) -> bool:
        """Whether a callable is installed."""
        return self.stack.has(name)


def fault(name: str) -> KnownFault:
    """A known fault of the vendor contract. Its work-around is applied on every generation: a new build may have it."""
    return load().fault(name)


@lru_cache(maxsize=1024)
def in_region(name: str, dtypes: tuple[tuple[str, torch.dtype], ...] = (), **numbers: int) -> bool:
    """Whether a call is where a known fault may be. `dtypes` are pairs of argument and dtype."""
    entry = fault(name)
    if entry.region is None:
        return True
    records = SimpleNamespace(**{argument: str(dtype).removeprefix("torch.") for argument, dtype in dtypes})
    return bool(entry.region.value({**entry.parameters, **numbers, "dtype": records}))


@lru_cache(maxsize=1024)
def broken_limit(name: str, **numbers: int) -> str | None:
    """The first limit of a vendor callable that a call with these dimensions breaks, in words; None if it breaks none.

    Limits that need other dimensions than the given ones are not looked at.
    """
    for limit in load().op(name).limits:
        if limit.form is None and limit.require.names <= numbers.keys() and not limit.require.value(numbers):
            facts = ", ".join(f"{key} = {numbers[key]}" for key in sorted(limit.require.names))
            return f"{facts}, but {limit.require} must hold ({limit.says}; {name})"
    return None


def check_limits(op: str, name: str, **numbers: int) -> None:
    """Raises Refused, in the name of `op`, where a call of vendor callable `name` would break a limit."""
    problem = broken_limit(name, **numbers)
    if problem:
        raise Refused(op, problem)
