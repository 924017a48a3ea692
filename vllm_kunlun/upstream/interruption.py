"""What vLLM does when a signal comes: while the engine is still starting, and while it serves."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

# Exit codes as shells report them: 128 + the signal's number.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def exit_code(error: KeyboardInterrupt) -> int:
    """Tell SIGTERM from SIGINT: vLLM turns the first into a KeyboardInterrupt that has a text, Python the second."""
    return TERMINATED if error.args else INTERRUPTED


def interruptible(original: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    """The same context manager, that lets a KeyboardInterrupt of its block out after it has cleaned up."""

    @contextmanager
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with original(*args, **kwargs) as resource:
            try:
                yield resource
            except KeyboardInterrupt as error:
                interrupt = error
                raise
        if interrupt is not None:
            raise interrupt

    return wrapper


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def leaving_quietly(original: Callable[[Any], None]) -> Any:
    """The same command, that an interrupt ends at once and with an exit code instead of a traceback.

    Python's event loop would hold Ctrl-C back until the engine is up, unless a handler other than Python's is there.
    """

    @functools.wraps(original)
    def command(args: Any) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        try:
            original(args)
        except KeyboardInterrupt as error:
            raise SystemExit(exit_code(error)) from None

    return staticmethod(command)


def knowing_the_end(original: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    """The same method of the engine's client, whose error says so when the client itself has ended the engine."""

    @functools.wraps(original)
    async def get_output(client: Any) -> Any:
        try:
            return await original(client)
        except Exception as error:
            error.was_ordered = not client._finalizer.alive  # type: ignore[attr-defined]
            raise

    return get_output


def is_news(record: logging.LogRecord) -> bool:
    """Filter of a logger: drops the loss of an engine that was told to end. Waiting requests get the error anyway."""
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, "was_ordered", False)
