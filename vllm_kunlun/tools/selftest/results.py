"""What a self-test found: plain records that JSON, HTML, the terminal and the submission are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1

CaseStatus = Literal["passed", "failed", "refused"]
FaultStatus = Literal["absent", "worked around", "not worked around", "unused", "not probed"]
RunStatus = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class ArgumentError:
    """How far one written argument is from the float32 reference.

    `relative_l2` is None where the result is not finite. `beyond` maps n to the number of the `elements` whose absolute
    error is above 10^-n. `allowed` is 0 for arguments that must be equal.
    """

    argument: str
    relative_l2: float | None
    allowed: float
    elements: int
    beyond: Mapping[int, int]

    @property
    def passed(self) -> bool:
        """Whether the error is within what the contract allows."""
        return self.relative_l2 is not None and self.relative_l2 <= self.allowed


@dataclass(frozen=True)
class CaseResult:
    """One case of an op. `message` says what is wrong, or why it was refused; empty where it passed."""

    name: str
    dtype: str
    status: CaseStatus
    message: str = ""
    errors: tuple[ArgumentError, ...] = ()

    @property
    def worst(self) -> ArgumentError | None:
        """The written argument that comes closest to its limit or goes furthest past it; exact ones come last."""
        return max(self.errors, key=_share_of_limit, default=None)


def _share_of_limit(error: ArgumentError) -> float:
    if error.relative_l2 is None:
        return float("inf")
    if error.allowed == 0:
        return float("inf") if error.relative_l2 else -1.0
    return error.relative_l2 / error.allowed


@dataclass(frozen=True)
class Timing:
    """Median of one case. `moved` bytes and `operations` are per call, None where the shapes do not tell them."""

    case: str
    dtype: str
    seconds: float
    moved: int | None
    operations: int | None

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes of the arguments over time."""
        return None if self.moved is None else self.moved / self.seconds / 1e9

    @property
    def gigaflops(self) -> float | None:
        """Multiplications and additions over time, in 10^9 a second."""
        return None if self.operations is None else self.operations / self.seconds / 1e9


@dataclass(frozen=True)
class OpResult:
    """One op: who serves it and why, its cases, and its time. `known_faults` are those of what serves it, in words."""

    name: str
    provider: str
    instruction_set: str
    reason: str
    cases: tuple[CaseResult, ...]
    timing: Timing | None = None
    known_faults: tuple[str, ...] = ()

    def count(self, status: CaseStatus) -> int:
        """Number of cases with a status."""
        return sum(case.status == status for case in self.cases)

    @property
    def status(self) -> RunStatus:
        """Failed where a case is, passed where one passed."""
        if self.count("failed"):
            return "failed"
        return "passed" if self.count("passed") else "not run"

    @property
    def worst(self) -> ArgumentError | None:
        """The error closest to its limit, of all cases."""
        found = [case.worst for case in self.cases if case.worst is not None]
        return max(found, key=_share_of_limit, default=None)


@dataclass(frozen=True)
class FaultResult:
    """One known fault of the vendor's kernels, called in the obvious way and through the op that works around it.

    `op` and `case` are None where no op of this release meets it. `detail` is what the obvious call did.
    """

    name: str
    kind: str
    status: FaultStatus
    callables: tuple[str, ...]
    symptom: str
    workaround: str
    op: str | None = None
    case: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class AllReduceResult:
    """Sum over two ranks; `seconds` is the time of one over `size` bytes."""

    status: RunStatus
    backend: str
    message: str = ""
    seconds: float | None = None
    size: int = 0


@dataclass(frozen=True)
class Report:
    """A whole run."""

    created: str
    mode: Literal["quick", "full"]
    target: str
    target_reason: str
    generation: str | None
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    environment: Mapping[str, str]
    ops: tuple[OpResult, ...]
    faults: tuple[FaultResult, ...]
    all_reduce: AllReduceResult
    seconds: float
    workarounds: bool = True
    schema: int = field(default=SCHEMA)

    @property
    def failures(self) -> Sequence[str]:
        """A line for everything that is wrong; empty where nothing is."""
        lines = [line for op in self.ops for line in _op_failures(op)]
        lines += [_fault_failure(fault) for fault in self.faults if fault.status == "not worked around"]
        if self.all_reduce.status == "failed":
            lines.append(f"all-reduce over {self.all_reduce.backend}: {self.all_reduce.message}")
        return lines

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"passed": self.passed, "failures": list(self.failures), **asdict(self)}


def _op_failures(op: OpResult) -> list[str]:
    failed = [case for case in op.cases if case.status == "failed"]
    lines = [f"{op.name}, case “{case.name}” in {case.dtype}: {case.message}" for case in failed]
    known = [f"{op.name}: known faults of what serves it: {' '.join(op.known_faults)}"] if op.known_faults else []
    return lines + known if lines else []


def _fault_failure(fault: FaultResult) -> str:
    place = f"{fault.op}, case “{fault.case}”" if fault.op else ", ".join(fault.callables)
    return f"{place}: known fault {fault.name}: {fault.detail} Known work-around: {fault.workaround}."
