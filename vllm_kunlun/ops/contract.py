"""The op contract: every kernel is an op ``torch.ops.kunlun.<name>``, defined once.

An op writes its results into arguments that its schema marks as mutated and returns nothing, so that a step can be
recorded and replayed without allocating. Providers (``host``, ``torch``, …) register against the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

NAMESPACE = "kunlun"

# Relative L2 error allowed against the float32 reference: about half a unit in the last place of the output's type.
DEFAULT_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Case:
    """One generated call of an op.

    ``args`` maps argument names to values, in schema order. ``dtype`` is the type whose tolerance applies.
    """

    name: str
    dtype: torch.dtype
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Op:
    """One op of the contract.

    ``reference`` takes the schema's arguments, computes in float32 on any device and writes the mutated ones; it is
    also the ``torch`` provider unless that provider registers something faster. ``cases`` yields calls that cover the
    corner shapes for one dtype, with tensors drawn from the given generator and mutated arguments filled as a caller
    would. ``exact`` names mutated arguments that must be equal, not merely close (integers, copies).
    """

    name: str
    schema: str
    reference: Callable[..., None]
    cases: Callable[[torch.Generator, torch.dtype], Iterator[Case]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    tolerances: Mapping[torch.dtype, float] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    exact: frozenset[str] = frozenset()

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that the schema declares as written."""
        arguments = torch._C.parse_schema(f"{NAMESPACE}::{self.name}{self.schema}").arguments
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def call(self) -> Callable[..., None]:
        """The dispatched op, ``torch.ops.kunlun.<name>``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


def define(op: Op) -> Op:
    """Adds `op` to the contract and defines ``torch.ops.kunlun.<name>``. Raises ValueError when the name is taken."""
    if op.name in _OPS:
        raise ValueError(f"op {op.name!r} is already defined in the contract")
    _LIBRARY.define(op.name + op.schema)
    # Every op only writes into its arguments, so the meta implementation has nothing to do.
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", lambda *args, **kwargs: None, lib=_LIBRARY)
    _OPS[op.name] = op
    return op


def ops() -> Mapping[str, Op]:
    """All ops of the contract, by name."""
    return dict(_OPS)


def register(name: str, implementation: Callable[..., None], dispatch_key: str) -> None:
    """Makes a Python function the implementation of op `name` for `dispatch_key` (``CPU``, ``CUDA``)."""
    _LIBRARY.impl(name, implementation, dispatch_key, allow_override=True)
