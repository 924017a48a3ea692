"""`vllm-kunlun ops --contract`: the vendor's callables, what is known of them, and their known faults."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator

import typer

from vllm_kunlun.targets.p800.contract import Generation, KnownFault
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.tools import contract_table


def show_contract(as_json: bool) -> None:
    """Print the vendor contract; loads no torch."""
    if as_json:
        typer.echo(json.dumps(contract_table.as_data(), indent=2))
        return
    width = min(120, shutil.get_terminal_size().columns)
    typer.echo("\n".join(lines(width)))


def lines(width: int) -> Iterator[str]:
    """The contract for a terminal of `width` columns: a paragraph for each callable, then one for each known fault."""
    for row in contract_table.rows():
        homes = ", ".join(f"{g.value} {presence}" for g, presence in zip(Generation, row.generations, strict=True))
        yield f"{row.name}  ({homes}; {row.confidence})"
        yield from _indented(f"{row.name.rpartition('.')[2]}{row.arguments}", width)
        yield from _indented(f"{row.computes}.", width)
        if row.faults:
            yield from _indented(f"Known faults: {', '.join(row.faults)}.", width)
    yield ""
    yield "Known faults"
    for fault in load().faults.values():
        yield from _fault_lines(fault, width)


def _fault_lines(fault: KnownFault, width: int) -> Iterator[str]:
    switch = "always there" if fault.always else f"{fault.kind}; {fault.confidence.value}"
    yield f"{fault.name}  ({switch})"
    yield from _indented(f"{', '.join(fault.ops)}: {fault.symptom}.", width)
    yield from _indented(f"Work-around: {fault.workaround}.", width)


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
