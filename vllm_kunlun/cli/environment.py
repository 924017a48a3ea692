"""`vllm-kunlun env`: the table of environment variables with their present values."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import typer

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.probe import current_choice
from vllm_kunlun.targets.p800 import environment


@dataclass(frozen=True)
class Row:
    """One variable as it is shown; `source` is environment, default, or error."""

    name: str
    type: str
    accepted: str
    value: str
    default: str
    source: str
    meaning: str


def rows(environ: Mapping[str, str] | None = None) -> list[Row]:
    """Return the table with the values of `environ` (default: os.environ)."""
    environ = os.environ if environ is None else environ
    return [_row(variable, environ) for variable in envs.VARIABLES]


def _row(variable: envs.Variable[Any], environ: Mapping[str, str]) -> Row:
    try:
        value, source = _text(variable.get(environ)), "environment" if variable.is_set(environ) else "default"
    except envs.EnvironmentVariableError as error:
        value, source = str(error), "error"
    default = _text(variable.default_value(environ))
    return Row(variable.name, variable.type, variable.accepted, value, default, source, variable.doc)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(str(entry) for entry in value) or "(none)"
    return "auto" if value is None else str(value)


def as_json(table: list[Row]) -> str:
    """Return the table as a JSON list of objects."""
    return json.dumps([asdict(row) for row in table], indent=2)


def as_markdown() -> str:
    """Return the table as documentation shows it: defaults instead of present values, the home folder as ``~``."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.accepted} | `{row.default}` | {row.meaning} |" for row in rows({"HOME": "~"})]
    return "\n".join(lines)


def as_text(table: list[Row], width: int) -> str:
    """Return the table for a terminal of `width` columns: a line with the value, then accepted values and meaning."""
    return "\n".join(_paragraph(row, width) for row in table)


def _paragraph(row: Row, width: int) -> str:
    details = f"{row.meaning} Accepted: {row.accepted}; default: {row.default}."
    meaning = textwrap.fill(details, width, initial_indent="    ", subsequent_indent="    ")
    return f"{row.name} = {row.value}  ({row.source})\n{meaning}"


def vendor_text(environ: Mapping[str, str]) -> str:
    """The vendor's variables as they stand in `environ`, one line each."""
    lines = [
        "",
        "Variables of the vendor's libraries, set on the targets p800 and emulated where they are unset:",
    ]
    for variable in environment.SET:
        given = environ.get(variable.name)
        state = f"{given}  (environment)" if given is not None else f"{variable.value}  (set at start)"
        lines.append(f"{variable.name} = {state}  {variable.reason}")
    return "\n".join(lines)


def show(table: list[Row]) -> None:
    """Print the table, then a line for each unknown variable with this package's prefix."""
    typer.echo(as_text(table, min(120, shutil.get_terminal_size().columns)))
    if current_choice().target in ("p800", "emulated"):
        typer.echo(vendor_text(os.environ))
    for stranger in envs.unknown_variables():
        typer.secho(str(stranger), fg=typer.colors.YELLOW, err=True)
