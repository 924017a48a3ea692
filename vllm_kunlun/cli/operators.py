"""`vllm-kunlun ops`: which provider serves each op, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from vllm_kunlun.cli.screen import CommandError

if TYPE_CHECKING:
    from vllm_kunlun.ops import OpRow


def show_ops(as_json: bool) -> None:
    """Print the table of ops; imports torch and loads the kernels.

    Raises CommandError when the kernels cannot be compiled.
    """
    table = _table()
    if as_json:
        print(json.dumps([asdict(row) for row in table], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("op", "provider", "instruction set", "why"):
        grid.add_column(title, overflow="fold")
    for row in table:
        grid.add_row(row.name, row.provider, row.instruction_set or "-", row.reason)
    Console().print(grid)


def _table() -> Sequence[OpRow]:
    from vllm_kunlun import ops
    from vllm_kunlun.platforms.probe import current_choice

    try:
        if current_choice().target == "emulated":
            from vllm_kunlun import emulator

            emulator.install()
        return ops.table()
    except start_errors() as error:
        raise CommandError(str(error)) from error


def start_errors() -> tuple[type[Exception], ...]:
    """What stops a server before it loads weights, too."""
    from vllm_kunlun.emulator import EmulatorSettingError
    from vllm_kunlun.ops import WrongProvider
    from vllm_kunlun.ops.native.build import BuildError
    from vllm_kunlun.ops.native.library import HostKernelsUnavailable
    from vllm_kunlun.targets.p800.probe import MissingVendorOps, UnknownStack
    from vllm_kunlun.targets.p800.questions import UnexpectedAnswer

    return (
        BuildError, HostKernelsUnavailable, WrongProvider, MissingVendorOps, UnknownStack, UnexpectedAnswer,
        EmulatorSettingError,
    )  # fmt: skip
