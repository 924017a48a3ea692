"""Ends a process whose parent is gone: a server killed with SIGKILL must not leave its engine running."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

logger = logging.getLogger("vllm.kunlun")

_CHECK_SECONDS = 1.0
_GRACE_SECONDS = 10.0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    logger.error("The parent process %d is gone; this process ends", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Watches the parent if this process was started by multiprocessing; does nothing in a main process."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(target=_watch, args=(parent.pid,), name="kunlun-parent-watch", daemon=True).start()
