"""Shapes in the contract's notation, matched against tensors with dimensions that are shared between arguments.

``T, Hq*D`` is a list of dimensions; ``...`` stands for any number of them, the same in every argument of a call; ``*``
for one of any size; ``*`` alone for any shape. A dimension that a call has not fixed yet is solved from the first
tensor that has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from vllm_kunlun.targets.p800.expressions import Expression

Shape = tuple[int, ...]


class ShapeMismatch(ValueError):
    """A tensor's shape is not what the contract says."""


@dataclass(frozen=True)
class Pattern:
    """`dims` holds expressions, None where any size will do; `rest` is where ``...`` stands, None without one."""

    text: str
    dims: tuple[Expression | None, ...]
    rest: int | None
    anything: bool


@cache
def parse(text: str) -> Pattern:
    """Reads a shape in the contract's notation."""
    if text == "*":
        return Pattern(text, (), None, True)
    items = [item.strip() for item in text.split(",")] if text else []
    rest = items.index("...") if "..." in items else None
    dims = tuple(None if item == "*" else Expression(item) for item in items if item != "...")
    return Pattern(text, dims, rest, False)


@dataclass
class Dimensions:
    """What is known about the dimensions of one call: their sizes, and the argument that fixed each."""

    sizes: dict[str, int] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    rest: Shape | None = None
    _pending: list[tuple[str, Expression, int]] = field(default_factory=list)

    def match(self, name: str, shape: Shape, alternatives: tuple[str, ...]) -> None:
        """Matches one tensor with the first alternative that fits; raises ShapeMismatch."""
        problems = []
        for text in alternatives:
            trial = Dimensions(dict(self.sizes), dict(self.origins), self.rest, list(self._pending))
            try:
                trial._match_one(name, shape, parse(text))
            except ShapeMismatch as mismatch:
                problems.append(str(mismatch))
            else:
                self.__dict__.update(trial.__dict__)
                return
        if problems:
            raise ShapeMismatch(" or ".join(dict.fromkeys(problems)))

    def finish(self) -> None:
        """Checks the dimensions that could not be solved when their tensor came; raises ShapeMismatch."""
        pending, self._pending = self._pending, []
        for name, expression, size in pending:
            self._solve(name, expression, size)
        if len(self._pending) < len(pending):
            self.finish()

    def _match_one(self, name: str, shape: Shape, pattern: Pattern) -> None:
        if pattern.anything:
            return
        fixed = self._without_rest(name, shape, pattern)
        for dimension, size in zip(pattern.dims, fixed, strict=True):
            if dimension is not None:
                self._solve(name, dimension, size)

    def _without_rest(self, name: str, shape: Shape, pattern: Pattern) -> Shape:
        """The sizes that the pattern names, after those under ``...`` were compared and taken out."""
        spare = len(shape) - len(pattern.dims)
        if spare < 0 or (spare > 0 and pattern.rest is None):
            raise ShapeMismatch(f"{name} has shape {list(shape)}, not ({pattern.text})")
        if pattern.rest is None:
            return shape
        rest = shape[pattern.rest : pattern.rest + spare]
        if self.rest is not None and rest != self.rest:
            raise ShapeMismatch(f"{name} has shape {list(shape)}; where it says '...' others have {list(self.rest)}")
        self.rest = rest
        return shape[: pattern.rest] + shape[pattern.rest + spare :]

    def _solve(self, name: str, expression: Expression, size: int) -> None:
        unknown = expression.names - self.sizes.keys()
        if not unknown:
            self._compare(name, expression, size)
        elif len(unknown) == 1:
            self._solve_for(next(iter(unknown)), name, expression, size)
        else:
            self._pending.append((name, expression, size))

    def _compare(self, name: str, expression: Expression, size: int) -> None:
        expected = expression.value(self.sizes)
        if expected != size:
            known = ", ".join(f"{n} = {self.sizes[n]} from {self.origins.get(n, 'the call')}" for n in expression.names)
            detail = f" ({known})" if known else ""
            raise ShapeMismatch(f"{name}: the dimension {expression} is {size} and should be {expected}{detail}")

    def _solve_for(self, unknown: str, name: str, expression: Expression, size: int) -> None:
        """Solves an expression that is linear in one unknown; leaves others for later."""
        at_zero, at_one = (expression.value({**self.sizes, unknown: value}) for value in (0, 1))
        slope = at_one - at_zero
        if slope == 0:
            self._pending.append((name, expression, size))
            return
        self.sizes[unknown] = (size - at_zero) // slope
        self.origins[unknown] = name
        if self.sizes[unknown] < 0 or expression.value(self.sizes) != size:
            raise ShapeMismatch(f"{name}: a dimension is {size}, which {expression} cannot be")
