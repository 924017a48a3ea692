"""Everything the checks look at, collected once, so that each check can be tried with made-up facts."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module, metadata
from pathlib import Path

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.machine import Machine
from vllm_kunlun.platforms.probe import TargetChoice, current_choice
from vllm_kunlun.targets.host import memory, threads
from vllm_kunlun.tools.doctor.vendor_facts import VendorFacts, collect_vendor

ENTRY_POINT_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


@dataclass(frozen=True)
class PluginEntry:
    """An entry point that vLLM loads: its group, name, value, and the distribution that declares it."""

    group: str
    name: str
    value: str
    distribution: str


@dataclass(frozen=True)
class TorchFacts:
    """The imported torch: `build` is cpu, cuda 13.0, rocm 7.0, … `error` is why it could not be imported."""

    version: str | None = None
    build: str = ""
    error: str = ""


@dataclass(frozen=True)
class KernelFacts:
    """The compiled host kernels and what compiles them.

    `library` is None where they are not compiled yet. `providers` counts ops by (provider, instruction set).
    """

    library: str | None = None
    toolchain: str | None = None
    missing_tools: str = ""
    providers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Space:
    """Memory and disk in bytes; `memory_limit` says who limits the memory; `cache_dir` is where `cache_free` is."""

    memory_total: int
    memory_available: int
    memory_limit: str
    shared_memory_free: int
    cache_dir: str
    cache_free: int


@dataclass(frozen=True)
class Facts:
    """All of it. `distributions` maps normalized names to the versions found on the path, in its order.

    `vendor` is None where nothing of a P800 is here.
    """

    python: str
    executable: str
    environ: Mapping[str, str]
    distributions: Mapping[str, tuple[str, ...]]
    entries: tuple[PluginEntry, ...]
    package_folder: str
    machine: Machine
    choice: TargetChoice
    cpus: int
    torch: TorchFacts
    kernels: KernelFacts
    space: Space
    vendor: VendorFacts | None = None

    def version(self, distribution: str) -> str | None:
        """Return the version of a distribution that Python would use, None when it is not installed."""
        versions = self.distributions.get(distribution, ())
        return versions[0] if versions else None


def collect() -> Facts:
    """Look at this process and this machine. Imports torch and loads the kernels if they are compiled.

    Where there is a P800, other processes load the vendor's libraries and sum over two cards.
    """
    torch = torch_facts()
    machine, choice = Machine.detect(), current_choice()
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        environ=dict(os.environ),
        distributions=installed_distributions(),
        entries=plugin_entries(),
        package_folder=str(Path(__file__).resolve().parents[2]),
        machine=machine,
        choice=choice,
        cpus=len(threads.usable_cpus()),
        torch=torch,
        kernels=KernelFacts(error="torch cannot be imported") if torch.error else kernel_facts(),
        space=space(),
        vendor=collect_vendor(machine, choice),
    )


def installed_distributions() -> dict[str, tuple[str, ...]]:
    """List every installed distribution; a name with two versions was installed over another one."""
    found: dict[str, tuple[str, ...]] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
        found[name] = (*found.get(name, ()), distribution.version)
    return found


def plugin_entries() -> tuple[PluginEntry, ...]:
    """List the entry points of vLLM's plugin groups."""
    points = [point for group in ENTRY_POINT_GROUPS for point in metadata.entry_points(group=group)]
    return tuple(
        PluginEntry(point.group, point.name, point.value, point.dist.name if point.dist else "?") for point in points
    )


def torch_facts() -> TorchFacts:
    """Import torch and tell which build it is."""
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    versions = torch.version
    for name, version in (("cuda", versions.cuda), ("rocm", versions.hip), ("xpu", getattr(versions, "xpu", None))):
        if version:
            return TorchFacts(torch.__version__, f"{name} {version}")
    return TorchFacts(torch.__version__, "cpu")


def kernel_facts() -> KernelFacts:
    """Tell whether the host kernels are compiled, and who serves the ops; compiles nothing."""
    from vllm_kunlun.ops.native import build

    tools = build.find_toolchain()
    known = KernelFacts(None, tools.compiler if tools is not None else None, build.missing_tools())
    try:
        path = build.library_path()
        if not path.is_file():
            return known
        return replace(known, library=str(path), providers=_count_providers())
    except (RuntimeError, OSError, envs.EnvironmentVariableError) as error:
        return replace(known, error=str(error))


def _count_providers() -> dict[tuple[str, str], int]:
    from vllm_kunlun import ops

    counts: dict[tuple[str, str], int] = {}
    for row in ops.table():
        key = (row.provider, row.instruction_set)
        counts[key] = counts.get(key, 0) + 1
    return counts


def space() -> Space:
    """Measure memory (as limited by control groups) and the free space of the cache folder's disk."""
    found = memory.read()
    folder = _cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    shared = Path("/dev/shm")
    return Space(
        memory_total=found.total,
        memory_available=found.available,
        memory_limit=found.limit,
        shared_memory_free=shutil.disk_usage(shared).free if shared.is_dir() else 0,
        cache_dir=str(folder),
        cache_free=shutil.disk_usage(existing).free,
    )


def _cache_dir() -> Path:
    """Return the cache folder, or its default where the setting cannot be used, which the target's check reports."""
    try:
        return envs.CACHE_DIR.get()
    except envs.EnvironmentVariableError:
        return envs.CACHE_DIR.default_value(os.environ)
