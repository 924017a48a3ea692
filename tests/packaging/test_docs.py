"""The documentation builds without a warning and its tables come from the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kunlun import ops
from vllm_kunlun.platforms import envs
from vllm_kunlun.tools.selftest import submission
from vllm_kunlun.upstream.patches import HOST_PATCHES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_environment_page_lists_every_variable(site: Path) -> None:
    page = (site / "user" / "environment.html").read_text()
    assert [variable.name for variable in envs.VARIABLES if variable.name not in page] == []


def test_op_page_lists_every_op(site: Path) -> None:
    page = (site / "developer" / "op-contract.html").read_text()
    assert [name for name in ops.ops() if name not in page] == []


def test_ledger_page_lists_every_patch(site: Path) -> None:
    page = (site / "developer" / "upstream-ledger.html").read_text()
    assert [patch.target for patch in HOST_PATCHES if patch.target not in page] == []


def test_hardware_page_says_not_run_for_the_card_that_nobody_reported(site: Path) -> None:
    page = (site / "hardware_reports" / "index.html").read_text()
    assert [name for name in ops.ops() if f"<code>{name}</code>" not in page] == []
    reports = submission.read_all(ROOT / "docs" / "hardware_reports")
    assert ("Kunlun3 P800</td>" in page) == all(report["target"] != "p800" for report in reports)
    assert all(report["target"] != "emulated" for report in reports), "the emulator is no hardware"


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'src="http' not in page
    assert "fonts.g" not in page
