"""Errors that stop a start because of what the user asked for, and their short form in the log.

The engine and its workers are processes of their own: vLLM logs a failed start there with its traceback, which
scrolls the one sentence that matters off the screen. `vllm-kunlun serve` therefore asks every process of the server,
through an environment variable, to log such an error without its traceback and to leave its message in a file, from
which the command line repeats it at the end. Other errors keep their traceback.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

ERROR_FILE = "_VLLM_KUNLUN_ERROR_FILE"
"""Names, in the environment of a server that `vllm-kunlun serve` started, the file for the message."""

_REFUSING_FILES = (
    "/vllm/config/",
    "/vllm/engine/arg_utils.py",
    "/vllm/v1/core/kv_cache_utils.py",
    "/vllm_kunlun/attention/p800.py",
    "/vllm_kunlun/attention/paged.py",
    "/vllm_kunlun/platforms/p800_policy.py",
    "/vllm_kunlun/platforms/policy.py",
    "/vllm_kunlun/targets/host/threads.py",
    "/vllm_kunlun/worker/kv_budget.py",
)
"""Where a ValueError is a refusal of what was asked for, and not a bug."""

_ECHOES = (
    "WorkerProc initialization failed",
    "Worker failed with error",
    "Engine core initialization failed",
    "EngineCore encountered an issue",
)
_ECHO_TEXT = "A process of the server ended; if it failed, it logged why before this line."


class StartError(ValueError):
    """The asked configuration cannot be started. The message says what was asked, what is wrong and what to do."""


def refusal_message(error: BaseException) -> str | None:
    """Return the text of an error that refuses what was asked for; None for others, which need their traceback.

    Refusals are a StartError, what was raised from one, and a ValueError of the modules that check configurations.
    """
    refusal = _start_error_behind(error)
    if refusal is not None:
        return str(refusal)
    if isinstance(error, ValueError) and _is_raised_by_config_checks(error):
        return readable(error)
    return None


def is_echo(error: BaseException) -> bool:
    """Tell whether `error` only repeats that a child process failed, which has logged why."""
    return str(error).startswith(_ECHOES)


def _start_error_behind(error: BaseException) -> StartError | None:
    link: BaseException | None = error
    while link is not None and not isinstance(link, StartError):
        link = link.__cause__
    return link


def _is_raised_by_config_checks(error: BaseException) -> bool:
    """Tell whether a check of configuration or KV cache size raised `error` (pydantic may have raised it again)."""
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
    """Logs a refusal as one message without a traceback, and keeps its process from printing one as it ends."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten `record` where it carries a refusal or the echo of one; never drops one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        message = refusal_message(error)
        if message is not None:
            _keep_first(message)
            _shorten(record, message)
        elif is_echo(error):
            _shorten(record, _ECHO_TEXT)
        return True


def _shorten(record: logging.LogRecord, message: str) -> None:
    record.msg, record.args = f"{record.getMessage()} {message}", ()
    record.exc_info = record.exc_text = None
    _silence_process_traceback()


def _keep_first(message: str) -> None:
    """Leave `message` for the command line, unless another process was first."""
    with Path(os.environ[ERROR_FILE]).open("a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write(message)


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
    """Install the filter on the handlers of vLLM's logger, where ERROR_FILE is set; more than once is harmless."""
    if not os.environ.get(ERROR_FILE) or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        return
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(entry, ShortStartErrors) for entry in handler.filters):
            handler.addFilter(ShortStartErrors())
