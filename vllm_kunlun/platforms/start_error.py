"""Errors that stop a start because of what the user asked for, and their short form in the log.

The engine and its workers are processes of their own: vLLM logs a failed start there with its traceback, which
scrolls the one sentence that matters off the screen. `vllm-kunlun serve` therefore asks every process of the server,
through an environment variable, to log such an error without its traceback. Other errors keep theirs.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import sys
import traceback

SHORT_ERRORS_MARK = "_VLLM_KUNLUN_SHORT_ERRORS"
"""Set to 1 in the environment of a server that `vllm-kunlun serve` started."""

_REFUSING_FILES = ("/vllm/config/", "/vllm/engine/arg_utils.py", "/vllm/v1/core/kv_cache_utils.py")
_ECHOES = ("WorkerProc initialization failed", "Engine core initialization failed")


class StartError(ValueError):
    """The asked configuration cannot be started. The message says what was asked, what is wrong and what to do."""


def short_message(error: BaseException) -> str | None:
    """Return the text of an error that needs no traceback, or None for an error that does.

    These need none: a StartError, or what was raised from one; a ValueError by which vLLM refuses a configuration;
    and an error that only repeats that a child process failed, because that process logged the cause.
    """
    refusal = _start_error_behind(error)
    if refusal is not None:
        return str(refusal)
    if isinstance(error, ValueError) and _is_raised_by_config_checks(error):
        return readable(error)
    if str(error).startswith(_ECHOES):
        return "a process of the server did not start; it logged its error before this line"
    return None


def _start_error_behind(error: BaseException) -> StartError | None:
    link: BaseException | None = error
    while link is not None and not isinstance(link, StartError):
        link = link.__cause__
    return link


def _is_raised_by_config_checks(error: BaseException) -> bool:
    """Tell whether vLLM's own checks of configuration and KV cache size raised `error` (pydantic may re-raise it)."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and any(place in frames[-1].filename for place in _REFUSING_FILES):
        return True
    return _is_validation(error)


def _is_validation(error: BaseException) -> bool:
    return type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic")


def readable(error: BaseException) -> str:
    """Return the message of an error; of a pydantic validation error only what was wrong, not the whole input."""
    if not _is_validation(error):
        return str(error)
    problems = error.errors(include_url=False, include_input=False)  # type: ignore[attr-defined]
    return "\n".join(_problem_text(problem["msg"], problem["loc"]) for problem in problems)


def _problem_text(message: str, location: tuple[str | int, ...]) -> str:
    place = ".".join(str(part) for part in location)
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{place}: {text}" if place else text


class ShortStartErrors(logging.Filter):
    """Logs a start error as one message without a traceback, and keeps its process from printing one as it ends."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten `record` where it carries such an error; never drops one."""
        error = record.exc_info[1] if record.exc_info else None
        message = None if error is None else short_message(error)
        if message is not None:
            record.msg, record.args = f"{record.getMessage()} {message}", ()
            record.exc_info = record.exc_text = None
            _silence_process_traceback()
        return True


def _silence_process_traceback() -> None:
    """Make multiprocessing's own traceback of this child process, which follows the log line, go nowhere."""
    if multiprocessing.parent_process() is not None and not isinstance(sys.stderr, _Silent):
        sys.stderr.flush()
        sys.stderr = _Silent()


class _Silent(io.TextIOBase):
    """A text stream that drops what is written to it."""

    def write(self, text: str) -> int:
        return len(text)


def shorten_start_errors() -> None:
    """Install the filter on the handlers of vLLM's logger, where the mark asks for it; more than once is harmless."""
    if os.environ.get(SHORT_ERRORS_MARK) != "1" or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        return
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(entry, ShortStartErrors) for entry in handler.filters):
            handler.addFilter(ShortStartErrors())
