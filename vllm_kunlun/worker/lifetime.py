"""Processes that vLLM starts: they end when their parent is gone, and a forked one lets go of what is its parent's."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger("vllm.kunlun")

_CHECK_SECONDS = 1.0
_GRACE_SECONDS = 10.0

_ENGINE_PROCESSES = ("EngineCore", "VllmWorker", "VLLM_DP_Coordinator")
"""What vLLM calls the processes of an engine; a program may fork others for itself, which are none of ours."""

_watching: int | None = None  # the process that has a watch already; a forked child must start its own


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    logger.error("The parent process %d is gone; this process ends", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Watches the parent, once, if this process was started by multiprocessing; does nothing in a main process."""
    global _watching  # noqa: PLW0603
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and _watching != os.getpid():
        _watching = os.getpid()
        threading.Thread(target=_watch, args=(parent.pid,), name="kunlun-parent-watch", daemon=True).start()


@functools.cache
def separate_forked_processes() -> None:
    """Makes each engine process that is forked from here on as independent of its parent as a spawned one."""
    util.register_after_fork(logger, _separate)


def _separate(_: object) -> None:
    """Runs in the forked process, before anything else does.

    Its parent's event loop is told of signals through a socket that both hold: a signal to this process would end the
    parent too. Its parent's handlers raise exceptions that nothing here expects.
    """
    if not multiprocessing.current_process().name.startswith(_ENGINE_PROCESSES):
        return
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _drop_bound_sockets()
    end_with_parent()


def _drop_bound_sockets() -> None:
    """Puts /dev/null in the place of the sockets that clients connect to: their port is free when the parent ends.

    Numbers stay taken, so that socket objects which still hold them close nothing of this process.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if _is_bound(descriptor):
            os.dup2(nothing, descriptor)
    os.close(nothing)


def _is_bound(descriptor: int) -> bool:
    """Whether it is a TCP socket with a port and without a peer."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # no socket, or closed since it was listed
        return False
    with copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return False
        return copy.getsockname()[1] != 0 and not _has_peer(copy)


def _has_peer(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
