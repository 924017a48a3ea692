"""Small expressions in the contract's data: limits, regions, dimensions.

Names, numbers, strings, arithmetic, comparisons, and, or, not, ``in`` a tuple, and ``dtype.x``, ``given.x``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is,
    ast.IsNot, ast.Tuple, ast.Name, ast.Load, ast.Constant, ast.Attribute,
)  # fmt: skip
# Attributes exist of these only: the dtype of an argument, and whether it was given.
_RECORDS = ("dtype", "given")


class ExpressionError(ValueError):
    """An expression in the data has a form that is not allowed."""


@dataclass(frozen=True)
class Expression:
    """One expression; its text is checked when it is made."""

    text: str

    def __post_init__(self) -> None:
        for node in ast.walk(self._tree):
            if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Attribute) and not _is_record(node.value)):
                raise ExpressionError(f"{self.text!r}: {type(node).__name__} is not allowed in an expression")

    def __str__(self) -> str:
        return self.text

    @cached_property
    def _tree(self) -> ast.Expression:
        try:
            return ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            raise ExpressionError(f"{self.text!r} is not an expression: {error.msg}") from error

    @cached_property
    def _code(self) -> CodeType:
        return compile(self._tree, f"<{self.text}>", "eval")

    @cached_property
    def names(self) -> frozenset[str]:
        """The names it needs, without `dtype` and `given`."""
        found = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        return frozenset(found - set(_RECORDS))

    @cached_property
    def attributes(self) -> frozenset[tuple[str, str]]:
        """The pairs ``(dtype, x)`` and ``(given, x)`` that it reads."""
        nodes = (node for node in ast.walk(self._tree) if isinstance(node, ast.Attribute))
        return frozenset((node.value.id, node.attr) for node in nodes if isinstance(node.value, ast.Name))

    def value(self, names: Mapping[str, Any]) -> Any:
        """Its value with `names`; raises NameError for a name that is not there."""
        return eval(self._code, {"__builtins__": {}}, names)


def _is_record(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in _RECORDS
