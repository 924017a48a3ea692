"""Judges one generated call of an op against the float32 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kunlun.ops.contract import Case, Op


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN or infinity in `actual` gives infinity."""
    a, e = actual.double().flatten(), expected.double().flatten()
    if a.numel() == 0:
        return 0.0
    error = (a - e).norm() / e.norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def _clone(value: Any) -> Any:
    """A copy that keeps strides and storage offset, so that strided cases stay strided."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.size(), value.stride())


def _widen(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _read_arguments(op: Op) -> set[str]:
    """Mutated arguments whose old content matters: those the cases fill with something finite."""
    return set(op.mutated) - {"out"} - {n for n in op.mutated if n.startswith("out")}


def poisoned(op: Op, case: Case) -> dict[str, Any]:
    """The case's arguments, with pure outputs filled with NaN (or a large negative integer)."""
    args = {name: _clone(value) for name, value in case.args.items()}
    for name in set(op.mutated) - _read_arguments(op):
        if isinstance(args[name], torch.Tensor):
            args[name].fill_(float("nan") if args[name].is_floating_point() else -(2**30))
    return args


def check(op: Op, case: Case, implementation: Callable[..., None]) -> None:
    """Runs `implementation` on the case and compares every mutated argument with the reference's."""
    args = poisoned(op, case)
    expected = {name: _widen(_clone(value)) for name, value in args.items()}
    untouched = {n: _clone(v) for n, v in args.items() if isinstance(v, torch.Tensor) and n not in op.mutated}
    op.reference(**expected)
    implementation(*args.values())
    for name in op.mutated:
        _compare(op, case, name, args[name], expected[name])
    for name, before in untouched.items():
        assert torch.equal(args[name], before), f"{op.name} {case.name}: argument {name} was written"


def _compare(op: Op, case: Case, name: str, actual: Any, expected: Any) -> None:
    if actual is None:
        return
    if name in op.exact:
        assert torch.equal(actual, expected.to(actual.dtype)), f"{op.name} {case.name}: {name} differs"
        return
    error = relative_l2(actual, expected)
    limit = op.tolerances[case.dtype]
    assert error <= limit, (
        f"{op.name} {case.name} {case.dtype}: {name} is off by {error:.2e} (relative L2), allowed {limit:.0e}"
    )
