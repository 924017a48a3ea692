"""Builds the host kernels against the installed torch: ``python -m vllm_kunlun.ops.native``.

torch's C++ interface differs between releases, so the kernels are compiled where they run, once per combination of
sources, torch and compiler, and kept in the cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_kunlun.platforms import envs

_PACKAGE = Path(__file__).resolve().parents[2]


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says which command failed and shows its output."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler, CMake and ninja."""

    compiler: str
    cmake: str
    ninja: str


def source_dir() -> Path:
    """The folder of the C++ sources: in the repository, or shipped inside the wheel."""
    for candidate in (_PACKAGE.parent / "csrc" / "host", _PACKAGE / "csrc" / "host"):
        if (candidate / "CMakeLists.txt").is_file():
            return candidate
    raise BuildError(f"the C++ sources are missing beside {_PACKAGE}; reinstall vllm-kunlun")


def find_toolchain() -> Toolchain | None:
    """The tools on PATH or in this Python environment, or None when one is missing."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = [os.environ.get("CXX") or shutil.which("g++", path=path) or shutil.which("clang++", path=path)]
    found += [shutil.which(tool, path=path) for tool in ("cmake", "ninja")]
    return None if None in found else Toolchain(*found)  # type: ignore[arg-type]


def missing_tools() -> str:
    """What to install when `find_toolchain` finds nothing."""
    return "a C++17 compiler (g++ or clang++), cmake and ninja (pip install 'vllm-kunlun[host]' brings the last two)"


def source_digest() -> str:
    """Hash of every source file, the torch version and the C++ ABI."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {torch._C._GLIBCXX_USE_CXX11_ABI}".encode())
    root = source_dir()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path() -> Path:
    """Where the library for the present sources and torch is, or will be."""
    return Path(envs.CACHE_DIR.get()) / "native" / f"libkunlun_host-{source_digest()}.so"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-60:])
        raise BuildError(f"compiling the host kernels failed: {' '.join(command)}\n{tail}")


def _cmake_definitions(tools: Toolchain) -> list[str]:
    import torch
    from torch.utils import cpp_extension

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        f"-DCMAKE_CXX_COMPILER={tools.compiler}",
        f"-DCMAKE_MAKE_PROGRAM={tools.ninja}",
        f"-DTORCH_INCLUDES={';'.join(cpp_extension.include_paths())}",
        f"-DTORCH_LIBS={';'.join(cpp_extension.library_paths())}",
        f"-DTORCH_DEFINES=_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def _compile(tools: Toolchain, build_dir: Path) -> Path:
    configure = [tools.cmake, "-G", "Ninja", "-S", str(source_dir()), "-B", str(build_dir)]
    _run(configure + _cmake_definitions(tools))
    _run([tools.cmake, "--build", str(build_dir)])
    return build_dir / "libkunlun_host.so"


def build(tools: Toolchain) -> Path:
    """Compiles the library if it is not in the cache and returns its path. Raises BuildError."""
    target = library_path()
    if target.is_file():
        return target
    try:
        return _build_locked(tools, target)
    except OSError as error:
        raise BuildError(
            f"the host kernels cannot be written to {target.parent}: {error.strerror or error}."
            " Set VLLM_KUNLUN_CACHE_DIR to another directory"
        ) from error


def _build_locked(tools: Toolchain, target: Path) -> Path:
    import torch
    from filelock import FileLock

    source_key = hashlib.sha256(str(source_dir()).encode()).hexdigest()[:8]
    build_dir = target.parent / f"build-torch{torch.__version__}-{source_key}"
    build_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(str(build_dir) + ".lock"):
        if not target.is_file():
            staged = target.with_suffix(f".{os.getpid()}.tmp")
            shutil.copy2(_compile(tools, build_dir), staged)
            staged.replace(target)
    return target


def main() -> int:
    """Builds and reports; 0 when built, up to date, or when there is no compiler (one warning), 1 when it failed."""
    tools = find_toolchain()
    if tools is None and not library_path().is_file():
        print(f"warning: host kernels not built, torch serves instead (slower). Install {missing_tools()}.")
        return 0
    started = time.monotonic()
    try:
        path = build(tools) if tools else library_path()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"host kernels: {path} ({time.monotonic() - started:.1f} s)")
    return 0
