"""Memory that this process may use: the machine's, or less where a control group limits it. All figures in bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """`total` is the usable memory, `available` what could be allocated now, `limit` says who sets `total`."""

    total: int
    available: int
    limit: str


def read(proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> HostMemory:
    """The tightest of the machine's memory and the control groups this process is in."""
    machine = psutil.virtual_memory()
    best = HostMemory(machine.total, machine.available, "machine")
    for group in _control_groups(proc, cgroup_root):
        limit, used = _limit_and_use(group)
        if limit is not None and limit < best.total:
            best = HostMemory(limit, max(0, min(best.available, limit - used)), f"control group {group}")
    return best


def _control_groups(proc: Path, root: Path) -> Iterator[Path]:
    """Folders of the memory control group of this process and of its ancestors (version 2 and version 1 layout)."""
    listing = proc / "self" / "cgroup"
    lines = listing.read_text().splitlines() if listing.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            folder = base / path.lstrip("/")
            yield from (p for p in (folder, *folder.parents) if p.is_relative_to(base) and p.is_dir())


def _limit_and_use(group: Path) -> tuple[int | None, int]:
    for limit_name, use_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, use = _read_bytes(group / limit_name), _read_bytes(group / use_name)
        if limit is not None:
            return limit, max(0, (use or 0) - _reclaimable(group))
    return None, 0


def _reclaimable(group: Path) -> int:
    """Page cache that the kernel drops before it refuses an allocation."""
    stat = group / "memory.stat"
    lines = stat.read_text().splitlines() if stat.is_file() else []
    fields = dict(line.split()[:2] for line in lines if line)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))


def _read_bytes(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else "max"
    return int(text) if text.isdigit() else None


def peak_resident() -> int:
    """Highest resident size of this process since the last `reset_peak_resident` (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident()


def reset_peak_resident() -> None:
    """Makes VmHWM start again from the present size (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident() -> int:
    """Resident size of this process."""
    return int(psutil.Process().memory_info().rss)


def zeros_on_demand(size: int) -> torch.Tensor:
    """int8 [size] of zeros whose pages the system hands out when they are first written.

    `torch.zeros` writes every page, so that a KV cache would occupy all of its memory before the first request.
    """
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.int8, count=size) if size else torch.empty(0, dtype=torch.int8)
