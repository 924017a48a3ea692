"""The API server's place behind the kernels, where both run on the same processors."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_kunlun.platforms import envs


def behind_the_kernels(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The same coroutine function, in a thread that gives way to every other.

    The engine runs already when it is called, and keeps its priority: a process inherits that of its parent only when
    it starts. Linux counts priorities by thread.
    """

    @functools.wraps(original)
    async def serve(*args: Any, **kwargs: Any) -> Any:
        os.nice(envs.SERVER_NICE.get())
        return await original(*args, **kwargs)

    return serve
