"""Chooses the target: which machine the models run on, or that this plugin stays inactive.

Standard library only. The facts come from `machine.Machine`, so that every case can be tried with made-up ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.machine import XPU_RUNTIME_LIBRARY, Machine

Target = Literal["p800", "host", "emulated"]
VllmBuild = Literal["cpu", "cuda", "rocm", "xpu", "tpu", "python"]
SETTING = envs.TARGET.name


@dataclass(frozen=True)
class TargetChoice:
    """The chosen target.

    `target` is None where the plugin stays inactive. `reason` is a phrase for the log. `error` says what is wrong
    and what to do when the wanted target cannot be used; then `active` is False and nothing may run.
    """

    target: Target | None
    active: bool
    reason: str
    error: str | None = None


def current_choice() -> TargetChoice:
    """Choose the target of this process from VLLM_KUNLUN_TARGET and this machine.

    A variable of this package whose value cannot be used is an error of the choice too.
    """
    try:
        envs.validate()
    except envs.EnvironmentVariableError as error:
        return TargetChoice(None, False, "a setting cannot be used", str(error))
    requested = envs.TARGET.get()
    if requested == "off":
        return _inactive(f"{SETTING}=off")
    return choose_target(Machine.detect(), requested)


def choose_target(machine: Machine, requested: envs.TargetName) -> TargetChoice:
    """Choose the target on `machine` for a value of VLLM_KUNLUN_TARGET."""
    if requested == "off":
        return _inactive(f"{SETTING}=off")
    if requested == "host":
        return TargetChoice("host", True, f"{SETTING}=host")
    if requested == "p800":
        return _p800(machine, f"{SETTING}=p800")
    if requested == "emulated":
        return _emulated(machine)
    return _automatic(machine)


def _automatic(machine: Machine) -> TargetChoice:
    if machine.xpytorch is not None or machine.xpu_devices:
        return _p800(machine, "xpytorch and the devices of a P800 are there")
    build = vllm_build(machine)
    devices = _devices_of(machine, build)
    if build in ("cpu", "tpu"):
        return _inactive(f"the installed vLLM is a {build.upper()} build and can use this machine itself")
    if devices:
        return _inactive(f"the installed vLLM is a {build} build and finds {devices[0]}")
    return TargetChoice("host", True, _host_reason(build))


def _host_reason(build: VllmBuild) -> str:
    if build == "python":
        return "there is no P800, and the installed vLLM has no compiled kernels of its own"
    return f"there is no P800, and the installed vLLM is a {build} build that finds no device"


def _p800(machine: Machine, reason: str) -> TargetChoice:
    faults = p800_faults(machine)
    if not faults:
        return TargetChoice("p800", True, reason)
    lines = "".join(f"\n  - {fault}" for fault in faults)
    return TargetChoice(
        "p800",
        False,
        reason,
        f"the target p800 cannot be used on this machine:{lines}\n"
        f"Set {SETTING}=host to run on the CPU on purpose, or {SETTING}=off to leave vLLM alone.",
    )


def p800_faults(machine: Machine) -> list[str]:
    """List what is missing for the target p800, each with what to do; empty when all of it is there."""
    faults = []
    if machine.xpytorch is None:
        faults.append("xpytorch (the package torch_xmlir) is not installed: install the vendor's torch for this Python")
    elif machine.xpytorch_disabled:
        faults.append("xpytorch is switched off by DISABLE_XPYTORCH: unset that variable")
    if not machine.xpu_devices:
        faults.append(
            "there is no device file /dev/xpu0: load the driver; in a container pass --device=/dev/xpu0 and "
            "--device=/dev/xpuctrl"
        )
    if machine.xpu_runtime is None:
        faults.append(
            f"the driver's runtime library {XPU_RUNTIME_LIBRARY} is not found: add its folder to LD_LIBRARY_PATH; "
            "in a container mount that folder first"
        )
    if "p800" not in machine.implemented:
        faults.append("this release of vllm-kunlun has no p800 target yet: it serves on the CPU only")
    return faults


def _emulated(machine: Machine) -> TargetChoice:
    reason = f"{SETTING}=emulated"
    if "emulated" in machine.implemented:
        return TargetChoice("emulated", True, reason)
    return TargetChoice(
        "emulated",
        False,
        reason,
        f"the target emulated is not in this release of vllm-kunlun yet. Set {SETTING}=host or unset it.",
    )


def _inactive(reason: str) -> TargetChoice:
    return TargetChoice(None, False, reason)


def vllm_build(machine: Machine) -> VllmBuild:
    """Tell which kind of vLLM is installed, by its version, its distribution's name and its compiled modules.

    A wheel for CUDA may carry no mark in its version; its compiled module tells. "python" has no kernels at all.
    """
    marks = f"{machine.vllm_distribution or ''} {machine.vllm_version or ''}"
    modules = machine.vllm_extensions
    if "cpu" in marks or _has_module(modules, "_C_AVX"):
        return "cpu"
    if "rocm" in marks or _has_module(modules, "_rocm_C"):
        return "rocm"
    if "xpu" in marks:
        return "xpu"
    if "tpu" in marks:
        return "tpu"
    return "cuda" if "+cu" in marks or ".cu1" in marks or _has_module(modules, "_C") else "python"


def _has_module(modules: tuple[str, ...], start: str) -> bool:
    return any(name.startswith(start) for name in modules)


def _devices_of(machine: Machine, build: VllmBuild) -> tuple[str, ...]:
    devices = {"cuda": machine.nvidia_devices, "rocm": machine.amd_devices, "xpu": machine.intel_devices}
    return devices.get(build, ())
