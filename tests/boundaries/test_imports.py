"""What may be imported from where: light modules stay light, and no package escapes the layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_kunlun"
HEAVY = ("torch", "vllm", "transformers", "numpy")
LIGHT = [
    "vllm_kunlun",
    "vllm_kunlun.platforms.envs",
    "vllm_kunlun.platforms.machine",
    "vllm_kunlun.platforms.probe",
    "vllm_kunlun.platforms.refusal",
    "vllm_kunlun.platforms.start_error",
    "vllm_kunlun.platforms.version",
    "vllm_kunlun.cli.main",
]


def loaded_after(statement: str) -> set[str]:
    """Names of the heavy packages that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}") == set()


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_after("import numpy")


def test_choosing_a_target_loads_nothing_heavy() -> None:
    assert loaded_after("import vllm_kunlun; vllm_kunlun.register()") == set()


def test_every_package_has_its_place_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = "\n".join(next(contract for contract in contracts if contract["type"] == "layers")["layers"])
    packages = [path.parent for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "platforms"]
    modules = [path.with_suffix("") for path in (PACKAGE / "platforms").glob("*.py") if path.stem != "__init__"]
    paths = [".".join(path.relative_to(ROOT).parts) for path in packages + modules]
    assert [path for path in paths if f"({path})" not in named] == []


POISON = """
import json, os, traceback
frames = [frame.filename for frame in traceback.extract_stack()]
with open(os.environ["TRITON_IMPORTERS"], "a") as stream:
    stream.write(json.dumps(frames) + "\\n")
raise ImportError("triton was imported")
"""

WALK = """
import importlib, pkgutil, vllm_kunlun
for module in pkgutil.walk_packages(vllm_kunlun.__path__, "vllm_kunlun."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def last_frame_outside_the_import_system(frames: list[str]) -> str:
    outside = [name for name in frames[:-1] if not name.startswith("<frozen importlib")]
    return outside[-1] if outside else ""


@pytest.mark.timeout(180)
def test_whole_package_imports_beside_a_triton_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(POISON)
    record = tmp_path / "importers"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "TRITON_IMPORTERS": str(record),
        "VLLM_KUNLUN_TARGET": "host",
    }
    command = [sys.executable, "-c", WALK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = record.read_text().splitlines() if record.exists() else []
    importers = [last_frame_outside_the_import_system(json.loads(line)) for line in lines]
    assert [name for name in importers if name.startswith(str(PACKAGE))] == []
