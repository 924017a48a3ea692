"""Memory limits and CPU shares of the host target, on made-up machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vllm_kunlun.targets.host import memory, threads


def make_cgroup(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def make_proc(tmp_path: Path, line: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(line + "\n")
    return proc


def test_control_group_limit_of_an_ancestor_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_cgroup(root, "pod", memory__max=str(1 << 30), memory__current=str(1 << 29))
    make_cgroup(root, "pod", memory__stat="inactive_file 1000\n")
    make_cgroup(root, "pod/app", memory__max="max", memory__current="5")
    found = memory.read(make_proc(tmp_path, "0::/pod/app"), root)
    assert found.total == 1 << 30
    assert found.available == (1 << 30) - ((1 << 29) - 1000)
    assert "pod" in found.limit


def test_version_1_control_group_limit_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_cgroup(root, "memory/job", memory__limit_in_bytes=str(1 << 29), memory__usage_in_bytes="0")
    found = memory.read(make_proc(tmp_path, "5:memory:/job"), root)
    assert found.total == 1 << 29


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    found = memory.read(make_proc(tmp_path, "0::/"), tmp_path / "cgroup")
    assert (found.total, found.limit) == (psutil.virtual_memory().total, "machine")


PEAK = """
from vllm_kunlun.targets.host import memory

memory.reset_peak_resident()
before = memory.peak_resident()
block = bytearray(b"x") * (64 << 20)
del block
print(memory.peak_resident() - before)
"""


def test_peak_resident_sees_an_allocation_that_is_gone() -> None:
    """In a process of its own: in this one, what other tests left could be freed in between."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) >= 60 << 20


def test_zeros_on_demand_are_zero_writable_and_take_no_memory_until_written() -> None:
    before = memory.resident()
    tensor = memory.zeros_on_demand(1 << 30)
    assert tensor.shape == (1 << 30,)
    assert memory.resident() - before < 64 << 20
    tensor[-5:] = 3
    assert tensor[-6:].tolist() == [0, 3, 3, 3, 3, 3]
    assert tensor.data_ptr() % 64 == 0


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert threads.physical_cpus([0, 1, 2, 3], tmp_path) == [0, 1]
    assert threads.physical_cpus([2, 3], tmp_path) == [2, 3]


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("150000 100000", 2), ("20000 100000", 1)])
def test_cpu_quota_is_rounded_up(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert threads.cpu_quota(tmp_path) == expected


def test_ranks_get_disjoint_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KUNLUN_CPU_BIND", "4-9")
    plans = [threads.plan(rank, 2) for rank in range(2)]
    assert [plan.cpus for plan in plans] == [(4, 5, 6), (7, 8, 9)]
    assert all(plan.num_threads == 3 for plan in plans)


def test_thread_count_is_overridable_and_more_threads_than_cpus_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KUNLUN_CPU_BIND", "4-5")
    monkeypatch.setenv("VLLM_KUNLUN_NUM_THREADS", "5")
    assert threads.plan(0, 1) == threads.ThreadPlan((), 5)
    monkeypatch.setenv("VLLM_KUNLUN_NUM_THREADS", "1")
    assert threads.plan(0, 1) == threads.ThreadPlan((4,), 1)


def test_more_ranks_than_cpus_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KUNLUN_CPU_BIND", "0,1")
    with pytest.raises(ValueError, match=r"4 workers.*2 CPUs.*--tensor-parallel-size"):
        threads.plan(0, 4)
