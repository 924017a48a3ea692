"""One call of an emulated callable: its arguments by the table's names, its dimensions, the faults that touch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm_kunlun.emulator.refusal import VendorRefusal
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.targets.p800.contract import Argument, Form, VendorOp


@dataclass(frozen=True)
class Partial:
    """A result of which only some rows are written: those of `mask` along dimension `dim` of `value`."""

    value: Tensor
    mask: Tensor
    dim: int = 0


Result = Tensor | Partial
Numerics = Callable[["Call"], Mapping[str, Result]]


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for torch.float16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Call:
    """`values` holds every argument; `replay` says that a graph replays it, with host tensors as they were captured."""

    op: VendorOp
    settings: Settings
    values: dict[str, Any]
    replay: bool = False
    form: Form | None = None
    dims: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def float32(self, name: str) -> Tensor:
        """A float32 copy of an argument."""
        value: Tensor = self.values[name]
        return value.to(torch.float32, copy=True)

    def given(self, name: str) -> bool:
        """Whether an argument is there and not None."""
        return self.values.get(name) is not None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The callable's arguments in this generation."""
        return self.op.arguments_in(self.settings.generation)

    def tensors(self) -> list[tuple[Argument, Tensor]]:
        """The tensors among the arguments."""
        pairs = ((argument, self.values[argument.name]) for argument in self.arguments if argument.is_tensor)
        return [(argument, value) for argument, value in pairs if isinstance(value, Tensor)]

    def names(self, parameters: Mapping[str, int] | None = None) -> dict[str, Any]:
        """What an expression of the table may refer to."""
        dtypes = {argument.name: dtype_name(tensor.dtype) for argument, tensor in self.tensors()}
        given = {name: value is not None for name, value in self.values.items()}
        records = {"dtype": SimpleNamespace(**dtypes), "given": SimpleNamespace(**given)}
        return {**self.values, **self.dims, **records, **(parameters or {})}

    def fault(self, name: str) -> bool:
        """Whether a fault of this callable is on and this call is in its region."""
        fault = self.op.fault(name)
        if not self.settings.active(fault):
            return False
        parameters = self.settings.faults.get(name, fault.parameters)
        return fault.region is None or bool(fault.region.value(self.names(parameters)))

    def refuse(self, rule: str) -> NoReturn:
        """Refuses the call; `rule` says which rule was broken."""
        raise VendorRefusal(self.op.name, rule)
