"""The way back out of a vendor's environment, as the documentation gives it, restores what was there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "docs" / "user" / "install.md"


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one empty module."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], str]:
    """Runs a script in a new environment, where pip finds the wheels of this test only."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    for name, version in (
        ("kernels", "1.0"),
        ("kernels", "2.0"),
        ("vllm", "0.25.1"),
        ("vllm-kunlun", "0.1"),
        ("more", "1.0"),
    ):
        make_wheel(tmp_path, name, version)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path / "env"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def run(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def blocks_under(heading: str) -> list[str]:
    section = INSTALL.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


@pytest.mark.timeout(120)
def test_way_back_restores_versions_and_names_additions(shell: Callable[[str], str], tmp_path: Path) -> None:
    (snapshot,) = [line for block in blocks_under("On a P800") for line in block.splitlines() if "freeze" in line]
    (way_back,) = blocks_under("The way back")
    shell("pip install kernels==1.0")
    before = shell("pip freeze")
    shell(snapshot)
    shell("pip install kernels==2.0 vllm vllm-kunlun more")
    (tmp_path / "env" / ".kunlun-ready").touch()
    printed = shell(way_back)
    assert "more==1.0" in printed.splitlines()
    assert shell("pip freeze").replace("more==1.0\n", "") == before
    assert not list((tmp_path / "env").glob(".kunlun-*"))
