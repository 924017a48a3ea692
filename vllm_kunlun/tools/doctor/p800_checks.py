"""Checks of a P800's driver and of the vendor's libraries; they find nothing where there is nothing of a P800."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vllm_kunlun.platforms.version import VersionRange
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.environment import FORBIDDEN, SET
from vllm_kunlun.targets.p800.minimums import DRIVER, FIRMWARE, PYTHON, TORCH, WHEELS
from vllm_kunlun.tools.doctor.facts import Facts
from vllm_kunlun.tools.doctor.finding import Finding, fail, ok, warn
from vllm_kunlun.tools.doctor.vendor_facts import MONITOR

_UNDEFINED = re.compile(r"undefined symbol: (\S+)")
_STACK_FIX = (
    "install the vendor's stack for torch 2.9 as a whole and in this order: torch==2.9.0, xpytorch, kunlun_ops, "
    "xspeedgate_ops, cocopod"
)


def torch_beside_xpytorch(facts: Facts, value: str) -> Finding:
    """Whether torch is the one that xpytorch is built for, and one that vLLM can use."""
    version, xpytorch = facts.torch.version or "", facts.machine.xpytorch
    if TORCH.contains(version):
        return ok("torch", f"{value}, with xpytorch {xpytorch}")
    if load().generation_of(version) is Generation.TORCH25:
        return fail(
            "torch",
            f"{value}, with xpytorch {xpytorch}: a stack for vLLM 0.15 and older; vLLM "
            f"{facts.machine.vllm_version or '0.25.1'} needs torch 2.9",
            _STACK_FIX,
        )
    return fail(
        "torch",
        f"{value}, but xpytorch {xpytorch} needs torch {TORCH.minimum}: torch was replaced",
        f"pip install --no-deps torch=={TORCH.minimum}, then run the vendor's xpytorch installer again; from then on "
        "install with pip install -c requirements/constraints-p800.txt",
    )


def driver(facts: Facts) -> Iterator[Finding]:
    """Releases of driver and firmware."""
    if facts.vendor is None:
        return
    monitor = facts.vendor.monitor
    if monitor.error:
        yield warn(
            "XPU driver",
            f"its release is not known: {monitor.error}",
            f"put {MONITOR} on PATH (in a container mount the host's), or compare by hand: driver {DRIVER.minimum} and "
            f"firmware {FIRMWARE.minimum} are the least",
        )
        return
    yield _release("XPU driver", monitor.driver, DRIVER)
    yield _release("XPU firmware", monitor.firmware, FIRMWARE)


def _release(name: str, version: str | None, least: VersionRange) -> Finding:
    if version is None:
        return warn(name, f"{MONITOR} does not show its release", f"compare by hand: {least.minimum} is the least")
    if VersionRange(least.package, least.minimum, "1000").contains(version):
        return ok(name, version)
    return fail(name, f"{version} is older than {least.minimum}", f"update the {least.package} on the host")


def device_files(facts: Facts) -> Iterator[Finding]:
    """The control device, and permissions."""
    if facts.vendor is None or not facts.machine.xpu_devices:
        return
    if not facts.vendor.control_device:
        yield fail(
            "XPU control device",
            "/dev/xpuctrl is not there",
            "load the driver; in a container add --device=/dev/xpuctrl beside the cards",
        )
    if facts.vendor.closed:
        names = ", ".join(facts.vendor.closed)
        yield fail(
            "XPU device files",
            f"this user may not open {names}",
            "add the user to the group that owns them; in a container start it with --privileged or as root",
        )


def interpreter(facts: Facts) -> Iterator[Finding]:
    """The Python that the vendor's wheels are built for."""
    if facts.vendor is not None and facts.machine.xpytorch is not None and not PYTHON.contains(facts.python):
        yield fail(
            "Python of the vendor's wheels",
            f"{facts.python}, but they are built for Python {PYTHON.minimum}",
            f"use an environment with Python {PYTHON.minimum}",
        )


def wheels(facts: Facts) -> Iterator[Finding]:
    """The operator wheels, and whether they are of the generation of the installed torch."""
    generation = load().generation_of(facts.torch.version or "")
    if facts.vendor is None or facts.machine.xpytorch is None or generation is None:
        return
    for expected in WHEELS[generation]:
        version = facts.version(expected.package)
        if version is None:
            fix = f"install the vendor's {expected.package} {expected} for torch {load().generations[generation].torch}"
            yield fail(expected.package, "not installed", fix)
        elif expected.contains(version):
            yield ok(expected.package, version)
        else:
            yield warn(expected.package, _other_generation(expected, version, generation), _STACK_FIX)


def _other_generation(expected: VersionRange, version: str, generation: Generation) -> str:
    others = [g for g in Generation if g is not generation]
    belongs = [
        g.value for g in others for wheel in WHEELS[g] if wheel.package == expected.package and wheel.contains(version)
    ]
    whose = f"belongs to the stack {belongs[0]}" if belongs else "is in no known stack"
    return f"{version} {whose}; with torch of {generation.value} go releases {expected}"


def libraries(facts: Facts) -> Iterator[Finding]:
    """Whether the vendor's compiled modules load, with all their symbols."""
    if facts.vendor is None:
        return
    found = facts.vendor.libraries
    for path, error in found.items():
        if error:
            yield fail(f"library {Path(path).name}", _load_problem(error), _load_fix(error))
    if found and not any(found.values()):
        yield ok("vendor libraries", f"{len(found)} load with all their symbols")


def _load_problem(error: str) -> str:
    symbol = _UNDEFINED.search(error)
    return f"it lacks the symbol {symbol.group(1)}" if symbol else error


def _load_fix(error: str) -> str:
    if _UNDEFINED.search(error):
        return f"it was built for another torch or another release of its neighbours; {_STACK_FIX}"
    if "cannot open shared object file" in error:
        return "add the folder of the missing library to LD_LIBRARY_PATH; in a container mount it from the host first"
    return _STACK_FIX


def vendor_ops(facts: Facts) -> Iterator[Finding]:
    """Callables that the ops of this release need."""
    if facts.vendor is None or facts.choice.target != "p800":
        return
    if facts.vendor.missing_ops:
        yield fail("vendor ops", "\n".join(facts.vendor.missing_ops), _STACK_FIX)
    elif facts.vendor.libraries and not any(facts.vendor.libraries.values()):
        yield ok("vendor ops", "all that this release needs are installed")


def link(facts: Facts) -> Iterator[Finding]:
    """A sum over two cards."""
    if facts.vendor is None or facts.vendor.all_reduce is None:
        return
    if facts.vendor.all_reduce == "":
        yield ok("link between cards", "the sum over two cards is right")
        return
    yield fail(
        "link between cards",
        facts.vendor.all_reduce,
        f"{MONITOR} topo -m shows the links: choose cards of one half of the node (0 to 3 or 4 to 7) with "
        "XPU_VISIBLE_DEVICES, and give the container --shm-size=32g. One card serves meanwhile",
    )


def variables(facts: Facts) -> Iterator[Finding]:
    """Variables of the vendor's that are set to what cannot work, or otherwise than this plugin would set them."""
    if facts.vendor is None:
        return
    for forbidden in FORBIDDEN:
        if facts.environ.get(forbidden.name, "") not in ("", "0"):
            yield fail(forbidden.name, f"is set: {forbidden.reason}", f"unset {forbidden.name}")
    for wanted in SET:
        value = facts.environ.get(wanted.name, wanted.value)
        if value != wanted.value:
            fix = f"unset {wanted.name}, so that it becomes {wanted.value}"
            yield warn(wanted.name, f"is {value}; it stands for: {wanted.reason}", fix)


CHECKS = (driver, device_files, interpreter, wheels, libraries, vendor_ops, link, variables)
