"""Registers stand-ins with torch's dispatcher, for the vendor's callables that live in `torch.ops`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.emulator.vendor import parameters, vendor_callable
from vllm_kunlun.targets.p800.contract import REQUIRED, Argument, VendorOp
from vllm_kunlun.upstream.stand_in import StandIns

_TYPES = {
    "tensor": "Tensor",
    "tensors": "Tensor[]",
    "int": "int",
    "ints": "int[]",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "generator": "Generator",
}


def schema(op: VendorOp, settings: Settings) -> str:
    """The dispatcher's schema of a callable: ``name(Tensor(a!) out, Tensor x, *, float eps=1e-05) -> ()``."""
    parts: list[str] = []
    for position, (keyword, argument) in enumerate(parameters(op, settings).items()):
        if argument.name == op.keywords_from:
            parts.append("*")
        parts.append(_argument(keyword, argument, position))
    returned = ", ".join("Tensor" for _ in op.returns)
    return f"{op.callable_name}({', '.join(parts)}) -> ({returned})"


def _argument(keyword: str, argument: Argument, position: int) -> str:
    alias = f"(a{position}!)" if argument.io != "in" and argument.kind == "tensor" else ""
    optional = "?" if argument.nullable else ""
    default = "" if argument.default is REQUIRED else f"={_literal(argument.default)}"
    return f"{_TYPES[argument.kind]}{alias}{optional} {keyword}{default}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


class DispatcherLibrary:
    """The namespace ``torch.ops.<name>`` with stand-ins for callables; `close` removes it."""

    def __init__(self, namespace: str, ops: Iterable[VendorOp], settings: Settings, stand_ins: StandIns) -> None:
        self._library = torch.library.Library(namespace, "DEF")
        for op in ops:
            function = vendor_callable(op, settings)
            if op.arguments is None:
                # An operator needs a schema; where the arguments are not known, only a refusal is there.
                stand_ins.new_attribute(getattr(torch.ops, namespace), op.callable_name, function)
            else:
                self._library.define(schema(op, settings))
                self._library.impl(op.callable_name, function, "CPU")

    def close(self) -> None:
        """Removes the operators."""
        self._library._destroy()
