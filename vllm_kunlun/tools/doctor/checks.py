"""The checks: each takes the facts and returns its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.probe import vllm_build
from vllm_kunlun.platforms.version import (
    SUPPORTED_PYTHON,
    SUPPORTED_TORCH,
    SUPPORTED_TRANSFORMERS,
    SUPPORTED_VLLM,
    __version__,
)
from vllm_kunlun.tools.doctor import p800_checks
from vllm_kunlun.tools.doctor.facts import Facts, PluginEntry
from vllm_kunlun.tools.doctor.finding import Finding, fail, ok, warn
from vllm_kunlun.tools.doctor.known_bad import bad_combinations

Check = Callable[[Facts], Iterator[Finding]]
_GIB = 1 << 30
_SMALL_MEMORY = 2 * _GIB
_SMALL_DISK = 1 * _GIB
_SMALL_SHARED_MEMORY = 256 << 20

OWN_ENTRIES = (
    ("vllm.platform_plugins", "kunlun", "vllm_kunlun:register"),
    ("vllm.general_plugins", "kunlun_model", "vllm_kunlun:register_model"),
    ("vllm.general_plugins", "kunlun_reasoning_parser", "vllm_kunlun:register_reasoning_parser"),
    ("vllm.general_plugins", "kunlun_tool_parser", "vllm_kunlun:register_tool_parser"),
)


def python(facts: Facts) -> Iterator[Finding]:
    """The interpreter's version."""
    value = f"{facts.python} ({facts.executable})"
    if SUPPORTED_PYTHON.contains(facts.python):
        yield ok("Python", value)
    else:
        yield fail("Python", value, f"use Python {SUPPORTED_PYTHON}; with ./kunlun: KUNLUN_PYTHON=/path/to/python3.11")


def torch(facts: Facts) -> Iterator[Finding]:
    """The imported torch, its build, and whether it is the one its owner installed."""
    found = facts.torch
    if found.version is None:
        yield fail("torch", found.error, "install torch, then run vllm-kunlun doctor again; ./kunlun installs it")
        return
    value = f"{found.version}, {found.build} build"
    if facts.machine.xpytorch is not None:
        yield p800_checks.torch_beside_xpytorch(facts, value)
    elif not SUPPORTED_TORCH.contains(found.version):
        yield fail("torch", value, f"install torch {SUPPORTED_TORCH}")
    else:
        yield ok("torch", value)


def vllm(facts: Facts) -> Iterator[Finding]:
    """Version of vLLM and kind of build."""
    version = facts.machine.vllm_version
    if version is None:
        yield fail("vLLM", "not installed", "./kunlun builds and installs it")
        return
    value = f"{facts.machine.vllm_distribution} {version}, {_build_text(facts)}"
    if SUPPORTED_VLLM.contains(version):
        yield ok("vLLM", value)
    elif facts.choice.target is None:
        yield ok("vLLM", f"{value}; this plugin is inactive")
    else:
        yield fail("vLLM", value, f"install vLLM {SUPPORTED_VLLM.minimum}; vllm-kunlun {__version__} is made for it")


def _build_text(facts: Facts) -> str:
    build = vllm_build(facts.machine)
    return "pure Python" if build == "python" else f"compiled for {build}"


def transformers(facts: Facts) -> Iterator[Finding]:
    """The release of transformers that goes with the installed vLLM."""
    version = facts.version("transformers")
    supported = SUPPORTED_TRANSFORMERS.get(facts.machine.vllm_version or "", SUPPORTED_TRANSFORMERS["0.25.1"])
    if version is None:
        yield fail("transformers", "not installed", f"pip install 'transformers{supported}'")
    elif supported.contains(version):
        yield ok("transformers", version)
    else:
        yield fail("transformers", f"{version}, outside {supported}", f"pip install 'transformers{supported}'")


def entry_points(facts: Facts) -> Iterator[Finding]:
    """Entry points of this plugin, and other plugins that compete with them."""
    missing = [f"{group}: {name}" for group, name, value in OWN_ENTRIES if not _has_entry(facts, group, name, value)]
    if missing:
        yield fail(
            "entry points", f"missing: {', '.join(missing)}", "pip install --force-reinstall --no-deps vllm-kunlun"
        )
    else:
        yield ok("entry points", f"{len(OWN_ENTRIES)}, resolved to {facts.package_folder}")
    for entry in facts.entries:
        if not _is_own(entry):
            yield from _foreign_entry(entry)
    yield from _duplicates(facts)


def _has_entry(facts: Facts, group: str, name: str, value: str) -> bool:
    return any((entry.group, entry.name, entry.value) == (group, name, value) for entry in facts.entries)


def _is_own(entry: PluginEntry) -> bool:
    return (entry.group, entry.name, entry.value) in OWN_ENTRIES and _normal(entry.distribution) == "vllm-kunlun"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _foreign_entry(entry: PluginEntry) -> Iterator[Finding]:
    name = f"plugin {entry.name}"
    value = f"{entry.value}, from {entry.distribution}"
    if entry.name.startswith("kunlun") or entry.value.startswith("vllm_kunlun"):
        yield fail(name, f"{value}: it shadows this plugin", f"pip uninstall {entry.distribution}")
    elif entry.group == "vllm.platform_plugins":
        yield warn(name, value, "vLLM accepts one active platform plugin: VLLM_PLUGINS chooses which are loaded")


def _duplicates(facts: Facts) -> Iterator[Finding]:
    """Two versions of one distribution: the files are a mixture of both."""
    for name in ("vllm-kunlun", "vllm", "torch", "transformers"):
        versions = facts.distributions.get(name, ())
        if len(versions) > 1:
            fix = f"pip uninstall {name}, until it is gone, then install it again; or start with a new environment"
            yield fail(f"{name} twice", f"versions {', '.join(versions)} are installed over each other", fix)


def target(facts: Facts) -> Iterator[Finding]:
    """The chosen target, and settings that have no effect."""
    choice = facts.choice
    if choice.error is not None:
        yield fail("target", choice.error, "see the lines above; vllm-kunlun env explains each variable")
    else:
        yield ok("target", f"{choice.target or 'inactive'}, because {choice.reason}")
    for stranger in envs.unknown_variables(facts.environ):
        yield warn("environment", str(stranger), f"unset {stranger.name}, or correct its name")


def devices(facts: Facts) -> Iterator[Finding]:
    """Device files of accelerators, and the CPUs this process may use."""
    machine = facts.machine
    nodes = (*machine.xpu_devices, *machine.nvidia_devices, *machine.amd_devices, *machine.intel_devices)
    yield ok("devices", f"{facts.cpus} CPU cores; accelerators: {', '.join(nodes) or 'none'}")
    if machine.xpu_devices and machine.xpu_runtime is None:
        yield fail(
            "XPU runtime",
            "libxpurt.so is not found",
            "add the driver's library folder to LD_LIBRARY_PATH; in a container mount that folder first",
        )


def kernels(facts: Facts) -> Iterator[Finding]:
    """The compiled kernels, the compiler, and who serves the ops; a target that cannot be used has none."""
    found = facts.kernels
    if facts.choice.error is not None or facts.choice.target not in (None, "host"):
        return
    if found.error:
        yield fail("kernels", found.error, "vllm-kunlun build compiles them again; a broken library may be deleted")
    elif found.library is None and found.toolchain is None:
        fix = f"install {found.missing_tools}, then run vllm-kunlun build"
        yield warn("kernels", "not compiled: torch serves the ops, several times slower", fix)
    elif found.library is None:
        yield warn("kernels", "not compiled yet; the first start compiles them", "vllm-kunlun build")
    else:
        counts = (f"{count} by {name} ({isa})" for (name, isa), count in sorted(found.providers.items()))
        yield ok("kernels", f"ops: {', '.join(counts)}; {found.library}")
    yield ok("compiler", found.toolchain or "none (needed only to compile the kernels)")


def memory(facts: Facts) -> Iterator[Finding]:
    """Memory that may be used, and shared memory for ranks."""
    space = facts.space
    value = f"{_gib(space.memory_available)} of {_gib(space.memory_total)} available (limit: {space.memory_limit})"
    if space.memory_available < _SMALL_MEMORY:
        yield warn(
            "memory", value, "end other programs, or raise the limit of the container; the demo model needs 2 GiB"
        )
    else:
        yield ok("memory", value)
    if space.shared_memory_free < _SMALL_SHARED_MEMORY:
        fix = "start the container with --shm-size=2g; ranks of one server talk through it"
        yield warn("shared memory", f"{space.shared_memory_free >> 20} MiB free in /dev/shm", fix)


def disk(facts: Facts) -> Iterator[Finding]:
    """Free space where prepared files are kept."""
    value = f"{_gib(facts.space.cache_free)} free for {facts.space.cache_dir}"
    if facts.space.cache_free < _SMALL_DISK:
        yield warn("disk", value, f"free some space, or set {envs.CACHE_DIR.name} to a folder on another disk")
    else:
        yield ok("disk", value)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


CHECKS: tuple[Check, ...] = (
    python,
    torch,
    vllm,
    transformers,
    entry_points,
    target,
    devices,
    kernels,
    memory,
    disk,
    *p800_checks.CHECKS,
    bad_combinations,
)


def examine(facts: Facts) -> list[Finding]:
    """Run every check."""
    return [finding for check in CHECKS for finding in check(facts)]
