"""The result of a comparison: JSON, a table for the terminal, and the page that is generated from the JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kunlun.tools.bench.measure import Sample, median, ratios
from vllm_kunlun.tools.bench.works import Work

SCHEMA = 1
Samples = Mapping[str, Sequence[Sample]]


def work_entry(work: Work, samples: Samples, ours: str) -> dict[str, Any]:
    """Summarize one work as plain JSON values: every sample, medians, ranges and ratios."""
    entry: dict[str, Any] = {
        "title": work.title,
        "unit": work.unit,
        "higher_is_better": work.higher_is_better,
        "concurrency": work.concurrency,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "servers": {name: server_entry(values) for name, values in samples.items()},
    }
    if ours in samples:
        entry["times_better"] = ratios(samples, ours, work.higher_is_better)
    return entry


def server_entry(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and range of one server's samples, and the samples."""
    values = [sample.value for sample in samples]
    return {
        "median": median(samples),
        "min": min(values),
        "max": max(values),
        "samples": [sample.as_dict() for sample in samples],
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, in a form that is stable to compare."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Put the works of `later` over those of `earlier`.

    Raises:
        ValueError: the two were not measured on the same machine with the same model, flags and versions.
    """
    for key in ("schema", "machine", "model", "launch", "runs"):
        if earlier[key] != later[key]:
            raise ValueError(f"The earlier result differs in its {key}: {earlier[key]} there, {later[key]} now.")
    for name in earlier["versions"].keys() & later["versions"].keys():
        if earlier["versions"][name] != later["versions"][name]:
            raise ValueError(f"The earlier result was measured with another {name}: {earlier['versions'][name]}.")
    united = {key: {**earlier[key], **later[key]} for key in ("versions", "server_commands", "works")}
    commands = list(dict.fromkeys([*earlier["commands"], *later["commands"]]))  # a work may have been measured again
    return {**earlier, **later, **united, "commands": commands}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """One row per work and server: title, server, median, range, how many times better ours is."""
    table = []
    for entry in result["works"].values():
        for name, server in entry["servers"].items():
            better = entry.get("times_better", {}).get(name)
            spread = f"{server['min']:.4g} to {server['max']:.4g}"
            ratio = "" if better is None else f"{better:.2f}x"
            table.append([entry["title"], name, f"{server['median']:.4g} {entry['unit']}", spread, ratio])
    return table


HEADER = ["work", "server", "median", "min to max", "vllm-kunlun is better by"]


def markdown_table(result: Mapping[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *rows(result)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
