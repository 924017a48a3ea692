"""What commands show on the terminal: results on stdout, errors and remarks on stderr."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer


class CommandError(Exception):
    """A command cannot do what was asked. The message says what was asked, what is wrong and what to do."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one error and leave with `code`."""
    _write_error(_styled("error:", fg=typer.colors.RED, bold=True) + f" {message}\n")
    raise SystemExit(code)


def note(message: str) -> None:
    """Print one remark."""
    _write_error(_styled(message, dim=True) + "\n")


def _styled(text: str, **style: bool | str) -> str:
    return typer.style(text, **style) if sys.stderr.isatty() else text  # type: ignore[arg-type]


def _write_error(text: str) -> None:
    """Write to stderr as text: vLLM replaces the stream's `write` by one that typer's `echo` does not get on with."""
    sys.stderr.write(text)
    sys.stderr.flush()
