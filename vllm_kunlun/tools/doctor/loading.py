"""Loads shared libraries, each in a process of its own: ``python -m vllm_kunlun.tools.doctor.loading PATH...``.

A library that was built for another torch lacks symbols, and one that was built for another driver may end the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("kunlun_ops", "xspeedgate_ops", "cocopod", "torch_xmlir")
_LIMIT_SECONDS = 120
_NEEDED_FIRST = "torch"  # extensions take its symbols from the process


def vendor_libraries(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """The compiled modules of the vendor's packages, found without importing them.

    Only those that Python itself would load: copies of the driver further down must not be loaded by path.
    """
    return sorted(library for package in packages for library in _compiled(package))


def _compiled(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module of this name is loaded but has no spec
        return []
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    single = [Path(spec.origin)] if spec.origin and spec.origin.endswith(".so") else []
    return single + [path for folder in folders for path in folder.glob("*.so")]


def load_errors(libraries: Sequence[Path]) -> dict[str, str]:
    """What went wrong with each library, "" where nothing did. Starts one process, which forks for each of them."""
    if not libraries:
        return {}
    command = [sys.executable, "-m", __name__, *map(str, libraries)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {str(path): f"not loaded after {_LIMIT_SECONDS} s" for path in libraries}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {str(path): f"{_NEEDED_FIRST} itself: {last}" for path in libraries}
    found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def load_error(path: str) -> str:
    """What went wrong with a library that a forked process loads with all its symbols; "" where nothing did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, _load(path).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        told = stream.read()
    status = os.waitpid(child, 0)[1]
    return f"it ended the process with signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else told


def _load(path: str) -> str:
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        return str(error)
    return ""


def main(paths: Sequence[str]) -> None:
    """Load each path; print what went wrong as a JSON object."""
    import_module(_NEEDED_FIRST)
    print(json.dumps({path: load_error(path) for path in paths}))


if __name__ == "__main__":
    main(sys.argv[1:])
