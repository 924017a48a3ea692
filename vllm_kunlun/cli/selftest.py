"""`vllm-kunlun selftest`: runs the self-test with a progress bar, prints a table and writes the reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kunlun.cli.screen import CommandError, note

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_kunlun.tools.selftest.results import Report
    from vllm_kunlun.tools.selftest.run import Scope
    from vllm_kunlun.tools.selftest.subject import Subject

_COLOURS = {
    "passed": "green", "absent": "green", "worked around": "yellow", "unused": "yellow", "failed": "bold red",
    "not worked around": "bold red", "not probed": "dim", "not run": "dim",
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What to run, and where the results go; `submission` is None where none was asked for."""

    quick: bool
    only: tuple[str, ...]
    workarounds: bool
    folder: Path
    submission: Path | None


def run_selftest(wanted: Wanted) -> int:
    """Run it, print and write the results; return the exit code: 1 when something is wrong.

    Raises CommandError where nothing can be tested, or the results cannot be written.
    """
    if wanted.submission is not None and (wanted.only or not wanted.workarounds):
        raise CommandError("--submit-file needs a run of everything: leave --op and --without-workarounds out")
    _prepare_process()
    from vllm_kunlun.tools.selftest.run import Scope, known_ops

    strangers = known_ops(wanted.only)
    if strangers:
        raise CommandError(f"there is no op {', '.join(strangers)}; vllm-kunlun ops lists them")
    report = _run(_subject(), Scope(wanted.quick, wanted.only, wanted.workarounds))
    show(report)
    _write(wanted, report)
    return 0 if report.passed else 1


def _prepare_process() -> None:
    """The vendor's variables, as in a server; they are read when its libraries load."""
    from vllm_kunlun.platforms.probe import current_choice
    from vllm_kunlun.targets.p800 import environment

    target = current_choice().target
    if target in ("p800", "emulated"):
        problem = environment.problem(os.environ)
        if problem is not None:
            raise CommandError(problem)
        environment.prepare(emulated=target == "emulated")


def _subject() -> Subject:
    from vllm_kunlun.cli.operators import start_errors
    from vllm_kunlun.platforms.probe import current_choice
    from vllm_kunlun.tools.selftest.subject import NothingToTest, subject

    expected: tuple[type[Exception], ...] = (NothingToTest, *start_errors())
    try:
        return subject(current_choice())
    except expected as error:
        raise CommandError(str(error)) from error


def _run(subject: Subject, scope: Scope) -> Report:
    from vllm_kunlun.tools.selftest.run import run, steps

    with _progress(steps(subject, scope)) as advance:
        return run(subject, scope, advance)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that counts what has begun."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)
        yield lambda what: progress.update(task, advance=1, description=what)


def show(report: Report) -> None:
    """Print the tables and, in one line each, what is wrong."""
    from rich.console import Console

    console = Console()
    _show_ops(console, report)
    if report.faults:
        _show_faults(console, report)
    summed = report.all_reduce
    told = summed.message or (f"{summed.seconds * 1e3:.1f} ms for {summed.size >> 20} MiB" if summed.seconds else "")
    colour = _COLOURS[summed.status]
    console.print(f"all-reduce over 2 ranks ({summed.backend or 'no backend'}): [{colour}]{summed.status}[/] {told}")
    for line in report.failures:
        console.print(f"wrong: {line}", style="red", markup=False, highlight=False)
    verdict = "passed" if report.passed else "failed"
    console.print(f"[bold {'green' if report.passed else 'red'}]{verdict}[/] on target {report.target}")


def _show_ops(console: Console, report: Report) -> None:
    from rich.table import Table

    from vllm_kunlun.tools.selftest.files import duration, error_text, speed

    several = len(_servers(report)) > 1
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("op", "right", "refused", "wrong", "worst", "time", "speed", *(["by"] if several else [])):
        grid.add_column(title, justify="left" if title in ("op", "by") else "right", no_wrap=True)
    for op in report.ops:
        colour = _COLOURS[op.status]
        counts = [f"[{colour}]{op.count('passed')}[/]", str(op.count("refused") or ""), str(op.count("failed") or "")]
        speeds = (duration(op.timing.seconds), speed(op.timing)) if op.timing is not None else ("", "")
        by = [f"{op.provider} {op.instruction_set}"] if several else []
        grid.add_row(op.name, *counts, error_text(op.worst), *speeds, *by)
    console.print(grid)
    if not several:
        console.print(f"all served by {', '.join(_servers(report))}", style="dim")


def _servers(report: Report) -> list[str]:
    return sorted({f"{op.provider} ({op.instruction_set})" for op in report.ops})


def _show_faults(console: Console, report: Report) -> None:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("known fault of the vendor", "here", "work-around"):
        grid.add_column(title, overflow="fold")
    for fault in report.faults:
        present = fault.status not in ("absent", "not probed")
        told = fault.workaround if present else fault.detail if fault.status == "not probed" else ""
        grid.add_row(fault.name, f"[{_COLOURS[fault.status]}]{fault.status}[/]", told)
    console.print(grid)


def _write(wanted: Wanted, report: Report) -> None:
    from vllm_kunlun.tools.selftest.files import write_files
    from vllm_kunlun.tools.selftest.submission import write_submission

    try:
        paths = write_files(wanted.folder, report)
        if wanted.submission is not None:
            write_submission(wanted.submission, report)
    except OSError as error:
        raise CommandError(f"the results cannot be written to {error.filename}: {error.strerror}") from error
    note(f"Written: {paths[0]} and {paths[1]}")
    if wanted.submission is not None:
        note(f"{wanted.submission} feeds the support tables; docs/hardware_reports/README.md says how to submit it.")
