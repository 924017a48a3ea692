"""`vllm-kunlun doctor`: prints the findings, each with its fix."""

from __future__ import annotations

import textwrap
from pathlib import Path

import typer

from vllm_kunlun.cli.screen import CommandError, note
from vllm_kunlun.tools.doctor import Facts, Finding, Status, collect, examine, write_report

_COLOURS: dict[Status, str] = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def run_doctor(report: Path | None) -> int:
    """Print the findings, write the report if asked for, and return the exit code: 1 when something is broken."""
    facts = collect()
    findings = examine(facts)
    for finding in findings:
        show(finding)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("fail", "warn")}
    typer.echo(f"{counts['fail']} broken, {counts['warn']} to be improved, of {len(findings)} findings.")
    if report is not None:
        _write(report, facts, findings)
    return 1 if counts["fail"] else 0


def _write(report: Path, facts: Facts, findings: list[Finding]) -> None:
    try:
        write_report(report, facts, findings)
    except OSError as error:
        raise CommandError(f"the report cannot be written to {report}: {error.strerror}") from error
    note(f"The report is in {report}. It holds no secrets, host or user names; look through it before you share it.")


def show(finding: Finding) -> None:
    """Print one finding: status, name, value, and its fix on a line of its own."""
    typer.secho(f"{finding.status:<5}", fg=_COLOURS[finding.status], nl=False)
    typer.echo(textwrap.indent(f"{finding.name}: {finding.value}", " " * 5)[5:])
    if finding.fix:
        typer.echo(f"     fix: {finding.fix}")
