"""The report as files: JSON with everything, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_kunlun.tools.doctor.report import Scrubber
from vllm_kunlun.tools.selftest.judging import DIGITS
from vllm_kunlun.tools.selftest.results import ArgumentError, CaseResult, OpResult, Report, Timing

JSON_NAME, HTML_NAME = "selftest.json", "selftest.html"

# The bar of an error runs from a millionth of what is allowed to a hundred times as much.
_DECADES = (-6.0, 2.0)

# What calls for attention comes first.
_FAULT_ORDER = ("not worked around", "worked around", "unused", "not probed", "absent")

# Variables that say how the ops were served.
_SETTINGS = ("VLLM_KUNLUN", "XPU", "XMLIR", "XFT", "BKCL", "CUDA_VISIBLE")


def write_files(folder: Path, report: Report) -> tuple[Path, Path]:
    """Writes both files, without names of the machine, its user or secrets; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / JSON_NAME, folder / HTML_NAME)
    paths[0].write_text(as_json(report), encoding="utf-8")
    paths[1].write_text(as_html(report), encoding="utf-8")
    return paths


def as_json(report: Report) -> str:
    """Everything that was found, as one JSON object."""
    clean = Scrubber.of_this_machine().scrub_all(report.as_dict())
    return json.dumps(clean, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_html(report: Report) -> str:
    """The page, from the template beside this module."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vllm_kunlun.tools.selftest", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(rate=rate, duration=duration, error=error_text, bar=bar)
    page = environment.get_template("report.html.j2").render(
        report=report,
        digits=DIGITS,
        dtypes=dtypes,
        cases_total=total(report.ops),
        faults=sorted(report.faults, key=lambda fault: _FAULT_ORDER.index(fault.status)),
        timed=any(op.timing for op in report.ops),
        settings={name: value for name, value in report.environment.items() if name.startswith(_SETTINGS)},
    )
    return str(Scrubber.of_this_machine().scrub(page))


def total(ops: Sequence[OpResult]) -> dict[str, int]:
    """Number of cases by status."""
    counts = {"passed": 0, "failed": 0, "refused": 0}
    for op in ops:
        for case in op.cases:
            counts[case.status] += 1
    return counts


def dtypes(op: OpResult) -> dict[str, list[CaseResult]]:
    """The cases of an op by dtype."""
    found: dict[str, list[CaseResult]] = {}
    for case in op.cases:
        found.setdefault(case.dtype, []).append(case)
    return found


def rate(number: float | None) -> str:
    """A figure with three digits, or a dash."""
    if number is None:
        return "-"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def speed(timing: Timing) -> str:
    """The rate that says more about an op: operations of a matrix product, bytes of everything else."""
    if timing.gigaflops is not None:
        return f"{rate(timing.gigaflops)} GFLOP/s"
    return "" if timing.gigabytes_per_second is None else f"{rate(timing.gigabytes_per_second)} GB/s"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def error_text(error: ArgumentError | None) -> str:
    """The relative error in words."""
    if error is None:
        return "-"
    if error.relative_l2 is None:
        return "not finite"
    return "equal" if error.relative_l2 == 0 else f"{error.relative_l2:.1e}"


def bar(error: ArgumentError | None) -> dict[str, Any]:
    """Length in percent of an error's bar, on a logarithmic scale, and of the mark of what is allowed."""
    low, high = _DECADES
    mark = 100 * (0 - low) / (high - low)
    if error is None or error.relative_l2 == 0:
        return {"length": 0, "mark": mark}
    if error.relative_l2 is None or error.allowed == 0:
        return {"length": 100, "mark": mark}
    decade = math.log10(error.relative_l2 / error.allowed)
    return {"length": max(1.0, min(100.0, 100 * (decade - low) / (high - low))), "mark": mark}
