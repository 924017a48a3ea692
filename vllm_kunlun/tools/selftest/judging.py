"""Runs one case of an op on the device and compares what it wrote with the float32 reference on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op
from vllm_kunlun.tools.selftest.results import ArgumentError, CaseResult

DIGITS = (1, 2, 3, 4, 5, 6)
"""Errors above 10^-n are counted for these n, as the vendor's accuracy tables do."""

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What a kernel or its binding raises."""

Arguments = dict[str, Any]
_HOST = torch.device("cpu")


def copied(args: Mapping[str, Any], device_of: Callable[[str], torch.device] = lambda name: _HOST) -> Arguments:
    """A copy of the arguments that keeps strides, offsets and which of them are views of the same memory."""
    whole: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
    return {name: _copy(value, device_of(name), whole) for name, value in args.items()}


def _copy(value: Any, device: torch.device, whole: dict[tuple[int, torch.dtype, torch.device], Tensor]) -> Any:
    """`whole` holds a copy of all the memory that a tensor is a view of."""
    if not isinstance(value, Tensor):
        return value
    if device.type != "cpu" and value.dtype == torch.float64:
        return value.float().to(device)  # the hardware has no float64
    storage = value.untyped_storage()
    key = (storage._cdata, value.dtype, device)
    if key not in whole:
        whole[key] = torch.empty(0, dtype=value.dtype).set_(storage).to(device, copy=True)
    return whole[key].as_strided(value.size(), value.stride(), value.storage_offset())


def wait(device: torch.device) -> None:
    """Waits for a card: its errors come late."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poisoned(op: Op, case: Case) -> Arguments:
    """The case's arguments, with pure outputs filled with NaN, or a large negative integer."""
    args = copied(case.args)
    for name in op.mutated:
        if name.startswith("out") and isinstance(args[name], Tensor):
            args[name].fill_(float("nan") if args[name].is_floating_point() else -(2**30))
    return args


def on_device(args: Mapping[str, Any], device: torch.device) -> Arguments:
    """The arguments as a caller has them: host copies stay on the host."""
    return copied(args, lambda name: _HOST if name.endswith("_cpu") else device)


def expected(op: Op, args: Mapping[str, Any]) -> Arguments:
    """What the reference writes, computed in float32 on the host."""
    wide = {name: _widened(value) for name, value in copied(args).items()}
    op.reference(**wide)
    return wide


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def compare(argument: str, actual: Tensor, wanted: Tensor, allowed: float) -> ArgumentError:
    """The relative L2 error in float64, and how many elements are off by more than each 10^-n."""
    a, e = actual.cpu().double().flatten(), wanted.double().flatten()
    # Equal infinities do not differ; NaN differs from everything.
    distance = torch.where(a == e, 0.0, (a - e).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    beyond = {n: int((distance > 10.0**-n).sum()) for n in DIGITS}
    size = e[e.isfinite()].norm().clamp_min(1e-30)
    error = float(distance.norm() / size)
    return ArgumentError(argument, error if error != float("inf") else None, allowed, a.numel(), beyond)


def written_errors(op: Op, dtype: torch.dtype, actual: Arguments, wanted: Arguments) -> tuple[ArgumentError, ...]:
    """The error of every mutated argument that the call has."""
    return tuple(
        compare(name, actual[name], wanted[name].to(actual[name].dtype) if name in op.exact else wanted[name],
                0.0 if name in op.exact else op.tolerances[dtype])
        for name in op.mutated if actual[name] is not None
    )  # fmt: skip


def unguarded(args: Arguments) -> AbstractContextManager[None]:
    """A context for one call that forbids nothing."""
    return nullcontext()


def judge(
    op: Op,
    case: Case,
    function: Callable[..., None],
    device: torch.device,
    refusal: type[Exception] | None = None,
    guard: Callable[[Arguments], AbstractContextManager[None]] = unguarded,
) -> CaseResult:
    """Judges one case. `refusal` is what the provider raises for a call that its kernels are known not to serve."""
    dtype = str(case.dtype).removeprefix("torch.")
    given = poisoned(op, case)
    try:
        actual = on_device(given, device)
        with guard(actual):
            function(*actual.values())
        wait(device)
    except FAILURES as error:
        refused = refusal is not None and isinstance(error, refusal)
        return CaseResult(case.name, dtype, "refused" if refused else "failed", _words(error))
    errors = written_errors(op, case.dtype, actual, expected(op, given))
    message = " ".join([*(_problem(error) for error in errors if not error.passed), *_overwritten(op, given, actual)])
    return CaseResult(case.name, dtype, "failed" if message else "passed", message, errors)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if type(error).__name__ == "Refused" else f"{type(error).__name__}: {text}"


def _problem(error: ArgumentError) -> str:
    if error.allowed == 0:
        count = max(error.beyond.values())
        return f"{error.argument} must be equal, and {count or 'some'} of {error.elements} elements differ."
    size = "not finite" if error.relative_l2 is None else f"off by {error.relative_l2:.1e} (relative L2)"
    return f"{error.argument} is {size}, allowed {error.allowed:.0e}."


def _overwritten(op: Op, given: Arguments, actual: Arguments) -> list[str]:
    """Inputs that the call changed."""
    inputs = [name for name, value in given.items() if isinstance(value, Tensor) and name not in op.mutated]
    changed = [n for n in inputs if not torch.equal(given[n].to(actual[n].dtype), actual[n].cpu())]
    return [f"the input {name} was written." for name in changed]
