"""Loads the compiled host kernels and calls their configuration functions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_kunlun.ops.native import build
from vllm_kunlun.platforms import envs


class HostKernelsUnavailable(RuntimeError):
    """There is no compiled library and none can be built; the message says what is missing."""


def _find_or_build() -> Path:
    path = build.library_path()
    if path.is_file():
        return path
    tools = build.find_toolchain()
    if tools is None:
        missing = build.missing_tools()
        raise HostKernelsUnavailable(f"the host kernels are not compiled and the tools are missing: {missing}")
    return build.build(tools)


@cache
def load() -> Any:
    """The library's functions (``torch.ops.kunlun_host``), loaded once per process, compiled first where needed.

    Raises HostKernelsUnavailable without a compiler and BuildError when compiling fails.
    """
    limit = envs.ISA.get()  # before minutes of compiling
    torch.ops.load_library(str(_find_or_build()))
    functions = torch.ops.kunlun_host
    functions.set_isa_limit("amx" if limit == "auto" else limit)
    return functions


def configure_threads(cpus: list[int], num_threads: int, spin_us: int) -> None:
    """Starts `num_threads` kernel threads, pinned to `cpus` if any; idle ones sleep after `spin_us` microseconds."""
    load().set_threads(num_threads, cpus, spin_us)
