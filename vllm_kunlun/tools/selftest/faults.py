"""Which known faults the installed kernels have, and whether the ops that meet them are right all the same.

``python -m vllm_kunlun.tools.selftest.faults NAME obvious|served`` makes one call in a process of its own: an error of
a real device may end the process, and what follows an error on the same device cannot be trusted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from vllm_kunlun import emulator
from vllm_kunlun.platforms.probe import current_choice
from vllm_kunlun.targets.p800.contract import KnownFault
from vllm_kunlun.targets.p800.probe import VendorStack
from vllm_kunlun.tools.selftest.fault_trials import TRIALS, Bench, NotTried, Trial
from vllm_kunlun.tools.selftest.judging import judge, unguarded
from vllm_kunlun.tools.selftest.results import CaseResult, FaultResult, FaultStatus
from vllm_kunlun.tools.selftest.subject import NothingToTest, Subject, subject
from vllm_kunlun.tools.selftest.vendor_calls import Vendor

SEED = 5
_LIMIT_SECONDS = 180
_RAISES = ("refuses", "absent", "absent keyword", "default", "falls back")
"""Kinds of faults that show as an error; an error of another kind means that the trial itself did not work."""

How = Literal["obvious", "served"]


@dataclass(frozen=True)
class Outcome:
    """What a call did. `raised` tells an error from a wrong result."""

    right: bool
    raised: bool = False
    message: str = ""


def bench_of(subject: Subject) -> Bench:
    """Trials with the thresholds that the emulator's faults have, or those of the contract."""
    emulated = subject.target == "emulated"

    def parameters(name: str) -> Mapping[str, int]:
        switched_on = emulator.current().settings.faults if emulated else {}
        return switched_on.get(name) or stack_of(subject).contract.fault(name).parameters

    return Bench(torch.Generator().manual_seed(SEED), parameters, emulated)


def stack_of(subject: Subject) -> VendorStack:
    """The vendor's stack; raises NothingToTest on the host, which has none."""
    if subject.stack is None:
        raise NothingToTest("the target host has no vendor kernels")
    return subject.stack


def call(subject: Subject, fault: KnownFault, how: How) -> Outcome:
    """Runs the trial of a fault, in the obvious way or through the op, in this process; raises NotTried."""
    trial = TRIALS[fault.name](bench_of(subject))
    function = _obvious(subject, trial) if how == "obvious" else subject.functions[trial.op.name]
    # The obvious calls read their own arguments on the host, which is no fault but where going there is the fault.
    guard = subject.guard if how == "served" or fault.kind == "falls back" else unguarded
    return _outcome(judge(trial.op, trial.case, function, subject.device, guard=guard))


def _obvious(subject: Subject, trial: Trial) -> Callable[..., None]:
    vendor = Vendor(stack_of(subject))
    return lambda *values: trial.obvious(vendor, dict(zip(trial.case.args, values, strict=True)))


def _outcome(result: CaseResult) -> Outcome:
    return Outcome(result.status == "passed", not result.errors and result.status != "passed", result.message)


def call_apart(subject: Subject, fault: KnownFault, how: How) -> Outcome:
    """As `call`, in a process of its own, with a time limit."""
    command = [sys.executable, "-m", __name__, fault.name, how]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(False, True, f"no result after {_LIMIT_SECONDS} s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return Outcome(False, True, " ".join(["the process ended with code", str(done.returncode), *last]))
    return Outcome(**json.loads(done.stdout.strip().splitlines()[-1]))


def try_fault(
    subject: Subject, fault: KnownFault, workarounds: bool = True, run: Callable[..., Outcome] = call
) -> FaultResult:
    """Tries one fault. Without `workarounds` one that is present counts as if nothing worked around it."""
    if fault.name not in TRIALS:
        return _result(fault, "not probed", None, "No op of this release meets it.")
    try:
        trial = TRIALS[fault.name](bench_of(subject))
    except NotTried as why:
        return _result(fault, "not probed", None, f"Not tried: {why}.")
    obvious = run(subject, fault, "obvious")
    if obvious.right:
        return _result(fault, "absent", trial, "The obvious call is right.")
    if obvious.raised and fault.kind not in _RAISES:
        return _result(fault, "not probed", trial, f"The obvious call failed: {obvious.message}")
    served = run(subject, fault, "served") if trial.used and (workarounds or fault.always) else None
    status, told = _judged(trial, served)
    return _result(fault, status, trial, f"The obvious call: {obvious.message}{told}")


def _judged(trial: Trial, served: Outcome | None) -> tuple[FaultStatus, str]:
    """What a fault that is present means, and what to add about the op; `served` is None where it was not called."""
    if not trial.used:
        return "unused", ""
    if served is None or not served.right:
        return "not worked around", f" The op: {served.message}" if served else ""
    return "worked around", ""


def _result(fault: KnownFault, status: FaultStatus, trial: Trial | None, detail: str) -> FaultResult:
    used = trial is not None and trial.used
    return FaultResult(
        name=fault.name,
        kind=fault.kind,
        status=status,
        callables=fault.ops,
        symptom=fault.symptom,
        workaround=fault.workaround,
        op=trial.op.name if trial is not None and used else None,
        case=trial.case.name if trial is not None and used else None,
        detail=detail,
    )


def faults_of(subject: Subject) -> tuple[KnownFault, ...]:
    """The faults that the target's generation may have; none on the host."""
    if subject.stack is None:
        return ()
    known = subject.stack.contract.faults.values()
    return tuple(fault for fault in known if subject.stack.generation in fault.generations)


def try_all(subject: Subject, workarounds: bool, advance: Callable[[str], None]) -> Iterator[FaultResult]:
    """Tries every fault; on a card each call has a process of its own."""
    run = call_apart if subject.device.type == "cuda" else call
    for fault in faults_of(subject):
        advance(f"fault {fault.name}")
        yield try_fault(subject, fault, workarounds, run)


def main(name: str, how: How) -> None:
    """One call in this process; prints the outcome as JSON."""
    tested = subject(current_choice())
    print(json.dumps(asdict(call(tested, stack_of(tested).contract.fault(name), how))))


if __name__ == "__main__":
    main(sys.argv[1], "served" if sys.argv[2] == "served" else "obvious")
