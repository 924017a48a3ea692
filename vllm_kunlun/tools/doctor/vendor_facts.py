"""What a P800's driver and the vendor's libraries say: files, one command, and processes that load them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kunlun.platforms.machine import Machine
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.tools import all_reduce
from vllm_kunlun.tools.doctor.loading import load_errors, vendor_libraries

MONITOR = "xpu-smi"
CONTROL_DEVICE = "dev/xpuctrl"
_BACKEND = "nccl"
_MONITOR_SECONDS = 30
_OPS_SECONDS = 180
_DRIVER = re.compile(r"driver version\s*[:|]\s*(\d[\d.]*)", re.IGNORECASE)
_FIRMWARE = re.compile(r"firmware(?: version)?\s*[:|]\s*(\d[\d.]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Monitor:
    """What `xpu-smi` prints; a version is None where it shows none. `error` says why it could not be asked."""

    driver: str | None = None
    firmware: str | None = None
    error: str = ""


@dataclass(frozen=True)
class VendorFacts:
    """`closed` are device files that may not be opened. `libraries` maps compiled modules to what went wrong with them.

    `missing_ops` are lines about callables that the ops need. `all_reduce` is what went wrong with a sum over two
    cards, "" where it is right, None where none was tried.
    """

    monitor: Monitor = Monitor()
    control_device: bool = True
    closed: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    missing_ops: tuple[str, ...] = ()
    all_reduce: str | None = None


def is_concerned(machine: Machine, choice: TargetChoice) -> bool:
    """Whether there is anything of a P800 here: the vendor's torch or devices, and no wish to use something else."""
    there = machine.xpytorch is not None or bool(machine.xpu_devices)
    return there and choice.target not in ("host", "emulated")


def collect_vendor(machine: Machine, choice: TargetChoice, root: Path = Path("/")) -> VendorFacts | None:
    """Look at the driver and load the libraries; None where nothing of a P800 is here.

    Device files are looked up below `root`.
    """
    if not is_concerned(machine, choice):
        return None
    libraries = load_errors(vendor_libraries())
    usable = choice.target == "p800" and choice.active and not any(libraries.values())
    return VendorFacts(
        monitor=ask_monitor(),
        control_device=(root / CONTROL_DEVICE).exists(),
        closed=closed_devices(machine, root),
        libraries=libraries,
        missing_ops=missing_ops() if usable else (),
        all_reduce=sum_over_two_cards() if usable and len(machine.xpu_devices) >= all_reduce.RANKS else None,
    )


def closed_devices(machine: Machine, root: Path) -> tuple[str, ...]:
    """Device files that this user may not read and write."""
    paths = {name: root / name.lstrip("/") for name in (*machine.xpu_devices, f"/{CONTROL_DEVICE}")}
    return tuple(n for n, path in paths.items() if path.exists() and not os.access(path, os.R_OK | os.W_OK))


def ask_monitor() -> Monitor:
    """Run `xpu-smi`, without arguments, as it takes none for its versions."""
    program = shutil.which(MONITOR)
    if program is None:
        return Monitor(error=f"{MONITOR} is not on PATH")
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=_MONITOR_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Monitor(error=f"{MONITOR}: {error}")
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return Monitor(error=f"{MONITOR} left with code {done.returncode}: {''.join(last)}")
    return parse_monitor(done.stdout)


def parse_monitor(text: str) -> Monitor:
    """The versions in the head of `xpu-smi`'s table, whose form is known from reports only: any spacing will do."""
    driver, firmware = _DRIVER.search(text), _FIRMWARE.search(text)
    return Monitor(driver and driver.group(1), firmware and firmware.group(1))


def missing_ops() -> tuple[str, ...]:
    """Lines about callables that the ops need and the wheels lack; asked in a process of its own."""
    command = [sys.executable, "-m", "vllm_kunlun.tools.doctor.vendor_ops"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_OPS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return (f"the vendor's libraries were not imported after {_OPS_SECONDS} s",)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return (f"importing the vendor's libraries failed: {last}",)
    return tuple(json.loads(done.stdout.strip().splitlines()[-1]))


def sum_over_two_cards() -> str:
    """What went wrong with an all-reduce between two cards, "" where nothing did."""
    try:
        all_reduce.two_ranks(_BACKEND)
    except all_reduce.AllReduceFailed as error:
        return str(error)
    return ""
