"""The wheel: what is in it, what it declares, and that it works in an environment that never saw the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.demo import demo_checkpoint
from tests.support.server import ENTRIES, LiveServer
from vllm_kunlun.platforms.version import __version__

ROOT = Path(__file__).resolve().parents[2]

ENTRY_POINTS = """\
[console_scripts]
vllm-kunlun = vllm_kunlun.cli.main:main

[vllm.general_plugins]
kunlun_model = vllm_kunlun:register_model
kunlun_reasoning_parser = vllm_kunlun:register_reasoning_parser
kunlun_tool_parser = vllm_kunlun:register_tool_parser

[vllm.platform_plugins]
kunlun = vllm_kunlun:register
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"vllm_kunlun-{__version__}.dist-info/{suffix}").decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, "METADATA"))


def test_wheel_is_pure_and_has_the_versions_of_the_table(wheel: Path) -> None:
    assert wheel.name == f"vllm_kunlun-{__version__}-py3-none-any.whl"


def test_every_module_and_data_file_is_in_the_wheel(names: set[str]) -> None:
    tracked = [path for path in (ROOT / "vllm_kunlun").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert [str(path.relative_to(ROOT)) for path in tracked if str(path.relative_to(ROOT)) not in names] == []


def test_kernel_sources_are_in_the_wheel(names: set[str]) -> None:
    sources = [path for path in (ROOT / "csrc/host").rglob("*") if path.is_file()]
    shipped = [f"vllm_kunlun/csrc/host/{path.relative_to(ROOT / 'csrc/host')}" for path in sources]
    assert sources
    assert set(shipped) <= names


def test_wheel_holds_nothing_else(names: set[str]) -> None:
    assert {name.partition("/")[0] for name in names} == {"vllm_kunlun", f"vllm_kunlun-{__version__}.dist-info"}


def test_entry_points_are_exactly_these(wheel: Path) -> None:
    assert read(wheel, "entry_points.txt").strip() == ENTRY_POINTS.strip()


def test_metadata_says_licence_python_and_extras(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == {"host", "p800", "demo", "dev"}


def test_metadata_requires_no_torch_and_no_vllm(metadata: Message) -> None:
    hard = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert hard
    assert not [line for line in hard if line.startswith(("torch", "vllm", "transformers"))]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; other packages come from this environment, which nothing is installed into."""
    folder = tmp_path_factory.mktemp("wheel-venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # A plain path is no site directory, so the editable install's own .pth there has no effect.
    Path(site.stdout.strip(), "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        [str(folder / "bin" / command[0]), *command[1:]],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_installed_wheel_is_what_gets_imported(installed: Path) -> None:
    out = run(installed, "python", "-c", "import vllm_kunlun; print(vllm_kunlun.__file__)")
    assert out.startswith(str(installed))


@pytest.mark.slow
def test_command_of_the_installed_wheel_runs(installed: Path) -> None:
    assert "serve" in run(installed, "vllm-kunlun", "--help")
    assert __version__ in run(installed, "vllm-kunlun", "version")


@pytest.mark.slow
def test_entry_points_of_the_installed_wheel_resolve_once(installed: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "for group in ('vllm.platform_plugins', 'vllm.general_plugins'):\n"
        "    for point in entry_points(group=group):\n"
        "        if point.value.startswith('vllm_kunlun'): print(point.name, point.load().__name__)\n"
    )
    assert sorted(run(installed, "python", "-c", code).split("\n"))[1:] == [
        "kunlun register",
        "kunlun_model register_model",
        "kunlun_reasoning_parser register_reasoning_parser",
        "kunlun_tool_parser register_tool_parser",
    ]


@pytest.mark.slow
def test_installed_wheel_finds_its_kernel_sources(installed: Path) -> None:
    code = "from vllm_kunlun.ops.native.build import source_dir; print(source_dir())"
    out = Path(run(installed, "python", "-c", code).strip())
    assert out.is_relative_to(installed)
    assert (out / "CMakeLists.txt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installed_wheel_serves(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENTRIES, "wheel", (str(installed / "bin" / "vllm-kunlun"), "serve"))
    flags = ["--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-memory-bytes", str(1 << 28)]
    server = LiveServer(demo_checkpoint(), flags, tmp_path / "log", entry="wheel")
    try:
        answer = server.client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        server.stop_cleanly()
    finally:
        server.kill()
