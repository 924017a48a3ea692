"""The small file of a run that owners of hardware may submit, and the support tables that are made from such files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kunlun.tools.doctor.report import Scrubber
from vllm_kunlun.tools.selftest.results import SCHEMA, OpResult, Report

KIND = "vllm-kunlun hardware report"
NOT_RUN = "not run"
_FIELDS = {
    "kind": str, "schema": int, "created": str, "mode": str, "passed": bool, "target": str, "versions": dict,
    "machine": dict, "ops": dict, "faults": dict, "all_reduce": str,
}  # fmt: skip


class BadSubmission(ValueError):
    """A file is no hardware report; the message names the file and what is wrong with it."""


def submission(report: Report) -> dict[str, Any]:
    """What a submission holds: versions, machine, counts and worst errors; no case, path, name or variable."""
    data = {
        "kind": KIND,
        "schema": SCHEMA,
        "created": report.created,
        "mode": report.mode,
        "passed": report.passed,
        "target": report.target,
        "generation": report.generation,
        "versions": dict(report.versions),
        "machine": dict(report.machine),
        "ops": {op.name: _op(op) for op in report.ops},
        "faults": {fault.name: fault.status for fault in report.faults},
        "all_reduce": report.all_reduce.status,
    }
    clean: dict[str, Any] = Scrubber.of_this_machine().scrub_all(data)
    return clean


def _op(op: OpResult) -> dict[str, Any]:
    worst, timing = op.worst, op.timing
    return {
        "provider": op.provider,
        **{status: op.count(status) for status in ("passed", "refused", "failed")},
        "worst_relative_l2": _rounded(worst.relative_l2 if worst is not None else None),
        "gigabytes_per_second": _rounded(timing.gigabytes_per_second if timing is not None else None),
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.3g}")


def write_submission(path: Path, report: Report) -> None:
    """Writes the file; raises OSError."""
    path.write_text(json.dumps(submission(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_submission(path: Path) -> dict[str, Any]:
    """A submitted file; raises BadSubmission."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadSubmission(f"{path.name} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("schema") != SCHEMA:
        raise BadSubmission(
            f"{path.name} is no {KIND} of schema {SCHEMA}; vllm-kunlun selftest --submit-file makes one"
        )
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(data.get(name), kind)]
    if wrong:
        raise BadSubmission(f"{path.name}: {', '.join(wrong)} missing or of another type")
    return data


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every submitted file of a folder, newest first."""
    return sorted(map(read_submission, folder.glob("*.json")), key=lambda report: str(report["created"]), reverse=True)


def hardware_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each report, and one that says `not run` for the P800 as long as it has none."""
    lines = ["| hardware | target | stack | ops right | cases refused | vendor faults present | all-reduce | date |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    if not any(report["target"] == "p800" for report in reports):
        lines.append(f"| Kunlun3 P800 | `p800` | {' | '.join([NOT_RUN] * 6)} |")
    return "\n".join([*lines, *map(_row, reports)])


def _row(report: Mapping[str, Any]) -> str:
    ops, machine, versions = report["ops"].values(), report["machine"], report["versions"]
    right = sum(op["passed"] > 0 and op["failed"] == 0 for op in ops)
    present = [name for name, status in report["faults"].items() if status not in ("absent", "not probed")]
    known = f"{len(present)} of {len(report['faults'])}" if report["faults"] else "-"
    stack = f"vLLM {versions.get('vllm', '?')}, torch {versions.get('torch', '?')}"
    cells = (
        _hardware(machine), f"`{report['target']}`", stack, f"{right} of {len(ops)}",
        str(sum(op["refused"] for op in ops)), known, report["all_reduce"], report["created"][:10],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _hardware(machine: Mapping[str, Any]) -> str:
    if "cards" in machine:
        return f"{machine['cards']} x P800, {machine.get('card_memory_gib', '?')} GiB"
    return f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"


def ops_table(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Markdown: every op, and what the newest report of each target says about it."""
    targets = ("host", "p800")
    newest = {t: next((r for r in reports if r["target"] == t), None) for t in targets}
    lines = [f"| op | {' | '.join(f'`{target}`' for target in targets)} |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {' | '.join(_cells(name, newest))} |" for name in names)])


def _cells(name: str, newest: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    for report in newest.values():
        op = None if report is None else report["ops"].get(name)
        yield NOT_RUN if op is None else _counts(op)


def _counts(op: Mapping[str, Any]) -> str:
    parts = [f"{op['passed']} right"]
    parts += [f"{op[key]} {word}" for key, word in (("refused", "refused"), ("failed", "**wrong**")) if op[key]]
    return ", ".join(parts)
