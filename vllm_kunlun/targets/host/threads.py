"""Which CPUs a worker's kernel threads run on."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from vllm_kunlun.platforms import envs

_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class ThreadPlan:
    """`cpus` to pin to, one per thread (empty: not pinned), and the number of kernel threads."""

    cpus: tuple[int, ...]
    num_threads: int


def allowed_cpus() -> list[int]:
    """CPUs in this process's affinity mask."""
    return sorted(os.sched_getaffinity(0))


def physical_cpus(cpus: list[int], folder: Path = _CPU_FOLDER) -> list[int]:
    """One CPU per physical core: kernels saturate a core, a second hardware thread only adds contention."""
    seen: set[str] = set()
    chosen = []
    for cpu in cpus:
        siblings = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text().strip() if siblings.is_file() else str(cpu)
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Whole CPUs that the control group's quota allows, rounded up; None without a quota."""
    version2 = root / "cpu.max"
    if version2.is_file():
        quota, period = version2.read_text().split()[:2]
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    version1 = root / "cpu" / "cpu.cfs_quota_us"
    if version1.is_file() and int(version1.read_text()) > 0:
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return max(1, math.ceil(int(version1.read_text()) / period_us))
    return None


def usable_cpus() -> list[int]:
    """Physical CPUs this process may use, within affinity and quota."""
    cpus = physical_cpus(allowed_cpus())
    return cpus[: cpu_quota() or len(cpus)]


def plan(local_rank: int, local_world_size: int) -> ThreadPlan:
    """This worker's share: ranks on one machine get disjoint CPUs. Raises ValueError when there are too few CPUs."""
    bind = envs.CPU_BIND.get()
    cpus = list(bind) if isinstance(bind, tuple) else usable_cpus()
    share = len(cpus) // local_world_size
    if share < 1:
        raise ValueError(
            f"{local_world_size} workers were asked for on this machine, which gives this process {len(cpus)} CPUs;"
            " a worker needs one at least. Lower --tensor-parallel-size (or --pipeline-parallel-size)."
        )
    mine = cpus[local_rank * share : (local_rank + 1) * share]
    threads = envs.NUM_THREADS.get() or len(mine)
    # More threads than CPUs, or an explicit "none": the operating system places them.
    pinned = bind != "none" and threads <= len(mine)
    return ThreadPlan(tuple(mine[:threads]) if pinned else (), threads)
