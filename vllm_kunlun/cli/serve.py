"""`vllm-kunlun serve`: vLLM's own server, with a model and an address by default and errors that fit on a screen."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm_kunlun.cli import prechecks
from vllm_kunlun.cli.command_line import CommandLine, unknown_flags
from vllm_kunlun.cli.demo_model import prepare_demo_model
from vllm_kunlun.cli.screen import CommandError, fail, note
from vllm_kunlun.platforms.probe import current_choice
from vllm_kunlun.platforms.start_error import ERROR_FILE, is_echo, readable, refusal_message, shorten_start_errors

DEFAULT_ADDRESS = {"--host": "127.0.0.1", "--port": "8356"}
_USAGE_ERROR = 2  # the exit code of argparse
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def serve(arguments: Sequence[str]) -> NoReturn:
    """Start vLLM's server in this process with the user's `arguments`; leaves with vLLM's exit code.

    Raises CommandError for what can be refused before vLLM is imported.
    """
    command = CommandLine.read(arguments)
    if any(token.startswith("--help=") for token in arguments):
        _run(command, arguments)
    choice = current_choice()
    if choice.error is not None:
        raise CommandError(choice.error)
    model, completed = complete(command)
    request = prechecks.Request(CommandLine(completed, command.config), model, choice)
    for check in prechecks.CHECKS:
        check(request)
    _run(command, completed)


def complete(command: CommandLine) -> tuple[str, tuple[str, ...]]:
    """Return the model and the arguments for ``vllm serve``; without a model, the demo model under its own name.

    Added flags come before the user's, so that the user's win in whatever spelling.
    """
    address = _missing_address(command)
    leading = command.leading_positional()
    if leading is not None:
        return leading, (leading, *address, *command.arguments[1:])
    given = command.value("--model", "--model-tag") or _positional_among_flags(command)
    if given is not None:
        return given, (*address, *command.arguments)
    path, name = prepare_demo_model()
    served_name = () if command.has("--served-model-name") else ("--served-model-name", name)
    return str(path), (str(path), *address, *served_name, *command.arguments)


def _missing_address(command: CommandLine) -> list[str]:
    if command.has("--uds"):
        return []
    return [part for flag, value in DEFAULT_ADDRESS.items() if not command.has(flag) for part in (flag, value)]


def _positional_among_flags(command: CommandLine) -> str | None:
    """Return a model that follows other flags. Only vLLM's parser knows which flags take a value."""
    if not command.may_have_positional():
        return None
    parser = _serve_parser()
    try:
        return parser.parse_args(list(command.arguments)).model_tag
    except SystemExit as error:
        _explain_usage_error(command, error)
        raise


def _serve_parser() -> Any:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    usage = "vllm-kunlun serve [MODEL] [flags]"
    return make_arg_parser(FlexibleArgumentParser(prog="vllm-kunlun serve", usage=usage))


def _vllm_main() -> Callable[[], None]:
    from vllm.entrypoints.cli.main import main

    return main


_ENGINE_IS_LOST = ("engine core exited unexpectedly", "output_handler failed")  # it is gone; it said that it goes


class _EngineWatch(logging.Handler):
    """Notices that vLLM lost its engine: its server then ends as if it had been asked to, with exit code 0."""

    lost = False

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.lost = self.lost or any(text in message for text in _ENGINE_IS_LOST)


def _run(command: CommandLine, arguments: Sequence[str]) -> NoReturn:
    """Hand over to vLLM's command line and leave with its exit code, or 1 when the engine died."""
    sys.argv = ["vllm", "serve", *arguments]
    _fork_processes()
    watch = _EngineWatch()
    with tempfile.NamedTemporaryFile("r", prefix="vllm-kunlun-", suffix=".error", encoding="utf-8") as errors:
        os.environ[ERROR_FILE] = errors.name
        try:
            main = _vllm_main()
            shorten_start_errors()  # vLLM may have been imported, and so called register(), before the file was named
            logging.getLogger("vllm").addHandler(watch)  # importing vLLM sets this logger's handlers anew
            main()
        except SystemExit as error:
            _explain_usage_error(command, error)
            raise
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None
        except (ValueError, OSError, RuntimeError) as error:
            fail(_explain(error, errors.read()))
    if watch.lost:
        fail("The engine process died and the server ended with it. The log above says why, unless it was killed.")
    raise SystemExit(0)


def _fork_processes() -> None:
    """Let vLLM fork the engine's process, unless the user chose: importing everything anew takes half of the start.

    Safe here and not in every program: nothing before the fork runs a kernel or a parallel torch op, whose threads the
    child would wait for.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")


def _explain_usage_error(command: CommandLine, error: SystemExit) -> None:
    """After argparse refused the flags, name the ones it does not know and those they may have been meant to be."""
    if error.code != _USAGE_ERROR:
        return
    known = [name for action in _serve_parser()._actions for name in action.option_strings]
    for flag, similar in unknown_flags(command, known).items():
        meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
        note(f"vllm serve has no flag {flag}{meant}")
    note("vllm-kunlun serve --help=WORD lists the flags that contain WORD, --help=all lists all.")


def _explain(error: ValueError | OSError | RuntimeError, logged: str) -> str:
    """Return one screen for an error that ended the start; raises it again where its traceback is needed.

    `logged` is the refusal that another process of the server logged, if one did. A ValueError or OSError of this
    process is vLLM's or transformers' refusal of the model or the configuration; a RuntimeError is not.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        raise error
    text = refusal_message(error)
    if text is None and is_echo(error):
        return logged or "a process of the server failed; what it logged above says why"
    if text is None and isinstance(error, RuntimeError):
        raise error
    return f"{text or readable(error)}\n(VLLM_LOGGING_LEVEL=DEBUG shows where this was raised.)"
