"""What the project's files may say: it speaks of itself only, and names no package registry's host."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Written in two pieces, so that this file does not contain what it looks for.
REGISTRY_HOSTS = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "download." + "pytorch",
    "registry." + "npmjs",
    "deb." + "debian.org",
    "bce" + "bos.com",
    "/sim" + "ple/",
]
WORKSHOP = [
    r"/wo" + r"rk/(main|shared|notes|peers)",
    r"\bsha" + r"red/(design|style|faults|prototype|vllm_surface|vendor_contract)",
    r"(?<![\w#] )\biss" + r"ues? (no\. ?)?#?\d+",
    r"\bhel" + r"per session",
    r"\bas an A" + r"I\b",
]


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def texts() -> dict[str, str]:
    found = {}
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data:
            found[str(path.relative_to(ROOT))] = data.decode()
    return found


def test_every_tracked_text_is_utf8_and_there_are_some() -> None:
    assert {"pyproject.toml", "README.md", "kunlun"} <= texts().keys()


@pytest.mark.parametrize("host", REGISTRY_HOSTS)
def test_no_registry_host_is_named(host: str) -> None:
    assert [name for name, text in texts().items() if host in text] == []


@pytest.mark.parametrize("pattern", WORKSHOP)
def test_project_speaks_of_itself(pattern: str) -> None:
    assert [name for name, text in texts().items() if re.search(pattern, text)] == []


def test_commit_messages_speak_of_the_project() -> None:
    log = subprocess.run(["git", "log", "--format=%B"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [pattern for pattern in WORKSHOP if re.search(pattern, log)] == []
