"""Fills the tables of the documentation from the code: a page says ``<!-- generated: NAME -->`` where one belongs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = re.compile(r"<!-- generated: (\S+) -->")


def environment_table() -> str:
    """The environment variables, as `vllm-kunlun env --format md` prints them."""
    from vllm_kunlun.cli.environment import as_markdown

    return as_markdown()


def vendor_environment_table() -> str:
    """The vendor's variables that are set, and those that must not be."""
    from vllm_kunlun.targets.p800.environment import FORBIDDEN, SET

    lines = ["| variable | value | why |", "|---|---|---|"]
    lines += [f"| `{v.name}` | `{v.value}` | {v.reason} |" for v in SET]
    lines += [f"| `{v.name}` | must not be set | {v.reason} |" for v in FORBIDDEN]
    return "\n".join(lines)


def ops_table() -> str:
    """Every op of the contract with what it writes, its types and the number of generated cases per type."""
    import torch

    from vllm_kunlun import ops

    lines = ["| op | writes | dtypes | cases per dtype |", "|---|---|---|---|"]
    for name, op in sorted(ops.ops().items()):
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in op.dtypes)
        cases = sum(1 for _ in op.cases(torch.Generator().manual_seed(0), op.dtypes[0]))
        lines.append(f"| `{name}` | {', '.join(f'`{argument}`' for argument in op.mutated)} | {dtypes} | {cases} |")
    return "\n".join(lines)


def patches_table() -> str:
    """The patch ledger: what is replaced, where, why, and the test that says when it can go."""
    from vllm_kunlun.upstream.patches import PATCHES

    lines = ["| target | applies to | reason | can go when this fails |", "|---|---|---|---|"]
    for patch in PATCHES:
        applies = f"{patch.distribution} {patch.versions}"
        lines.append(f"| `{patch.target}` | {applies} | {patch.reason} | `{patch.test}` |")
    return "\n".join(lines)


def vendor_contract() -> str:
    """The vendor's callables and their known faults, from the contract's data files."""
    from vllm_kunlun.tools.contract_table import as_markdown

    return as_markdown()


HARDWARE_REPORTS = Path(__file__).parent / "hardware_reports"


def hardware_table() -> str:
    """The machines that submitted reports are from; the P800 is `not run` until one is."""
    from vllm_kunlun.tools.selftest import submission

    return submission.hardware_table(submission.read_all(HARDWARE_REPORTS))


def hardware_ops_table() -> str:
    """Every op of the contract, and what the newest report of each target says about it."""
    from vllm_kunlun import ops
    from vllm_kunlun.tools.selftest import submission

    return submission.ops_table(submission.read_all(HARDWARE_REPORTS), sorted(ops.ops()))


TABLES: dict[str, Callable[[], str]] = {
    "env": environment_table,
    "hardware": hardware_table,
    "hardware_ops": hardware_ops_table,
    "ops": ops_table,
    "patches": patches_table,
    "vendor_contract": vendor_contract,
    "vendor_env": vendor_environment_table,
}


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by MkDocs for each page; an unknown name raises KeyError and fails the build."""
    return MARKER.sub(lambda match: TABLES[match.group(1)](), markdown)
