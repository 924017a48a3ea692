"""What a measurement ran on: everything needed to read the figures, nothing that identifies the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)


@dataclass(frozen=True)
class Machine:
    """The processor, memory and kernel that a measurement ran on."""

    cpu: str
    cores: int
    memory_gib: float
    isa: tuple[str, ...]
    kernel: str

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "isa": list(self.isa)}

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, {' '.join(self.isa)}"


def _first_values(text: str) -> Mapping[str, str]:
    """Map each key of a ``key : value`` file to its first value."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            values.setdefault(key.strip(), value.strip())
    return values


def read_machine(proc: Path = Path("/proc")) -> Machine:
    """Describe this machine; cores are those that this process may use, memory is the machine's total."""
    cpuinfo = _first_values((proc / "cpuinfo").read_text())
    meminfo = _first_values((proc / "meminfo").read_text())
    flags = set(cpuinfo.get("flags", "").split())
    return Machine(
        cpu=cpuinfo.get("model name", platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(int(meminfo["MemTotal"].split()[0]) / 2**20, 1),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        kernel=platform.release(),
    )
