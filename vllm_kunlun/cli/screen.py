"""What commands show on the terminal: results on stdout, errors and progress on stderr."""

from __future__ import annotations

from typing import NoReturn

import typer


class CommandError(Exception):
    """A command cannot do what was asked. The message says what was asked, what is wrong and what to do."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one error and leave with `code`."""
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(message, err=True)
    raise SystemExit(code)


def note(message: str) -> None:
    """Print one remark to stderr."""
    typer.secho(message, dim=True, err=True)
