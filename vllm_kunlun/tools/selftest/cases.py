"""Every case of every op, judged and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm_kunlun import ops
from vllm_kunlun.ops.contract import Case, Op
from vllm_kunlun.tools.selftest.judging import judge
from vllm_kunlun.tools.selftest.results import CaseResult, OpResult
from vllm_kunlun.tools.selftest.subject import Subject
from vllm_kunlun.tools.selftest.timing import time_case, work

SEED = 20261130
"""The seed of the contract's own tests: sums in a sampler's cases may fall to either side of a bound with another."""

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """One op and the dtypes in which its cases run."""

    op: Op
    dtypes: tuple[torch.dtype, ...]


def plans(subject: Subject, quick: bool, names: Iterable[str] = ()) -> list[Plan]:
    """What to run: every dtype, or with `quick` the one that models run in on the target."""
    chosen = set(names) or set(ops.ops())
    usual = torch.bfloat16 if subject.target == "host" else torch.float16
    return [
        Plan(op, ((usual,) if usual in op.dtypes else op.dtypes[:1]) if quick else op.dtypes)
        for name, op in sorted(ops.ops().items())
        if name in chosen
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operators are faster without threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_op(subject: Subject, plan: Plan, timed: bool, advance: Advance) -> OpResult:
    """Judges all cases of one op; times the one with the most work of the last dtype if asked."""
    op, row, function = plan.op, subject.rows[plan.op.name], subject.functions[plan.op.name]
    results: list[CaseResult] = []
    largest: Case | None = None
    for dtype in plan.dtypes:
        advance(f"{op.name} {dtype}".replace("torch.", ""))
        with _one_thread():
            for case in map(subject.laid_out, op.cases(torch.Generator().manual_seed(SEED), dtype)):
                results.append(judge(op, case, function, subject.device, subject.refusal, subject.guard))
                if results[-1].status == "passed" and (largest is None or work(op, case) >= work(op, largest)):
                    largest = case
    right = not any(result.status == "failed" for result in results)
    timing = time_case(op, largest, function, subject.device) if timed and right and largest else None
    faults = tuple(f"{fault.name} (work-around: {fault.workaround})." for fault in subject.known_faults(op.name))
    return OpResult(op.name, row.provider, row.instruction_set, row.reason, tuple(results), timing, faults)
