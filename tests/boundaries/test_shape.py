"""The shape that keeps the code readable: short modules, no heaps, one packaging file, version checks in one place."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_kunlun"
MODULES = sorted(PACKAGE.rglob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_modules_stay_under_400_lines() -> None:
    assert [str(path) for path in MODULES if len(path.read_text().splitlines()) > 400] == []


def test_functions_stay_short() -> None:
    lengths = {f"{path.name}:{f.name}": length(f) for path in MODULES for f in functions(path)}
    assert statistics.median(lengths.values()) <= 12
    assert [name for name, lines in lengths.items() if lines > 60] == []


@pytest.mark.parametrize("name", ["utils.py", "util.py", "helpers.py", "misc.py", "common.py"])
def test_no_heap_module(name: str) -> None:
    assert [str(path) for path in MODULES if path.name == name] == []


def test_one_packaging_file() -> None:
    assert not [name for name in ("setup.py", "setup.cfg", "requirements.txt") if (ROOT / name).exists()]


def test_versions_are_compared_in_upstream_and_in_the_versions_table_only() -> None:
    comparison = re.compile(r"(vllm|torch|transformers)\.__version__\s*[<>=!]=?|[<>=!]=?\s*\w+\.__version__")
    places = [path for path in MODULES if "upstream" not in path.parts and comparison.search(path.read_text())]
    assert [str(path) for path in places] == []
