"""The whole self-test: the ops, the vendor's known faults, and a sum over two ranks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from vllm_kunlun.platforms.machine import Machine, installed_version
from vllm_kunlun.platforms.version import __version__
from vllm_kunlun.targets.p800.profile import P800
from vllm_kunlun.tools import all_reduce
from vllm_kunlun.tools.bench.machine import read_machine
from vllm_kunlun.tools.doctor.report import kept_variables
from vllm_kunlun.tools.selftest.cases import plans, run_op
from vllm_kunlun.tools.selftest.faults import faults_of, try_all
from vllm_kunlun.tools.selftest.results import AllReduceResult, Report
from vllm_kunlun.tools.selftest.subject import Subject

Advance = Callable[[str], None]
_VENDOR_WHEELS = ("kunlun-ops", "xspeedgate-ops", "cocopod")


@dataclass(frozen=True)
class Scope:
    """How much is run: `quick` is one dtype, `only` names ops, without `workarounds` a present fault fails."""

    quick: bool = False
    only: tuple[str, ...] = ()
    workarounds: bool = True


def steps(subject: Subject, scope: Scope) -> int:
    """How often `run` calls `advance`."""
    dtypes = sum(len(plan.dtypes) for plan in plans(subject, scope.quick, scope.only))
    return dtypes if scope.only else dtypes + len(faults_of(subject)) + 1


def run(subject: Subject, scope: Scope, advance: Advance) -> Report:
    """Runs everything, or with ``scope.only`` these ops alone; `advance` is told what comes next."""
    started = time.perf_counter()
    timed = subject.target != "emulated"  # a stand-in's time says nothing
    ops = tuple(run_op(subject, plan, timed, advance) for plan in plans(subject, scope.quick, scope.only))
    faults = () if scope.only else tuple(try_all(subject, scope.workarounds, advance))
    summed = AllReduceResult("not run", "", "only some ops were asked for") if scope.only else _sum(subject, advance)
    return Report(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        mode="quick" if scope.quick else "full",
        target=subject.target,
        target_reason=subject.reason,
        generation=subject.generation,
        versions=versions(),
        machine=machine(subject),
        environment=kept_variables(os.environ),
        ops=ops,
        faults=faults,
        all_reduce=summed,
        seconds=time.perf_counter() - started,
        workarounds=scope.workarounds,
    )


def _sum(subject: Subject, advance: Advance) -> AllReduceResult:
    advance("all-reduce over two ranks")
    card = subject.device.type == "cuda"
    backend = P800.dist_backend if card else "gloo"
    if card and torch.cuda.device_count() < all_reduce.RANKS:
        return AllReduceResult("not run", backend, "there is one card")
    try:
        seconds = all_reduce.two_ranks(backend)
    except all_reduce.AllReduceFailed as error:
        return AllReduceResult("failed", backend, str(error))
    return AllReduceResult("passed", backend, "", seconds, all_reduce.BYTES)


def versions() -> dict[str, str]:
    """Versions of everything that a result depends on, of what is installed."""
    found = Machine.detect()
    names = {"vllm": found.vllm_version, "xpytorch": found.xpytorch, "torch": torch.__version__}
    names |= {name: installed_version(name) for name in _VENDOR_WHEELS}
    present = {name: version for name, version in names.items() if version is not None}
    return {"vllm-kunlun": __version__, "python": platform.python_version(), **present}


def machine(subject: Subject) -> dict[str, Any]:
    """The processor, and on a card the cards."""
    described: dict[str, Any] = read_machine().as_dict()
    if subject.device.type == "cuda":
        described["cards"] = len(Machine.detect().xpu_devices)
        described["card"] = torch.cuda.get_device_name(subject.device)
        described["card_memory_gib"] = round(torch.cuda.get_device_properties(subject.device).total_memory / 2**30, 1)
    return described


def known_ops(names: Iterable[str]) -> list[str]:
    """Names among `names` that are no ops of the contract."""
    from vllm_kunlun import ops

    return sorted(set(names) - set(ops.ops()))
