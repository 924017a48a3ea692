"""Writes what is needed to reproduce a problem, and nothing that identifies a person, a machine or an account."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_kunlun.platforms.version import __version__
from vllm_kunlun.tools.doctor.facts import Facts
from vllm_kunlun.tools.doctor.finding import Finding

_KEPT_VARIABLES = re.compile(
    r"VLLM|KUNLUN|XPU|XMLIR|XPYTORCH|XCCL|BKCL|XTORCH|CUDA|NVIDIA|HIP_|ROCR_|OMP_|KMP_|GOMP_|MKL_|TORCH|PYTORCH|NCCL"
    r"|GLOO|HF_|TRANSFORMERS_|LD_PRELOAD$|LD_LIBRARY_PATH$|MALLOC_|PYTHONPATH$|XDG_CACHE_HOME$"
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_TOKEN_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-)[A-Za-z0-9_-]{8,}|\beyJ[\w-]{10,}\.[\w.-]+")
MASK = "***"


def build_report(facts: Facts, findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the report as JSON-ready data, with secrets masked and names replaced."""
    report = {
        "vllm_kunlun": __version__,
        "findings": [asdict(finding) for finding in findings],
        "python": {"version": facts.python, "implementation": platform.python_implementation()},
        "system": system(),
        "cpu": cpu(Path("/proc/cpuinfo")),
        "machine": {**asdict(facts.machine), "implemented": sorted(facts.machine.implemented)},
        "target": asdict(facts.choice),
        "torch": asdict(facts.torch),
        "space": asdict(facts.space),
        "vendor": asdict(facts.vendor) if facts.vendor is not None else None,
        "entry_points": [asdict(entry) for entry in facts.entries],
        "environment": kept_variables(facts.environ),
        "packages": [
            f"{name}=={version}" for name, versions in sorted(facts.distributions.items()) for version in versions
        ],
    }
    cleaned: dict[str, Any] = Scrubber.of_this_machine().scrub_all(report)
    return cleaned


def system() -> dict[str, str]:
    """Return kernel, architecture, C library and distribution of the operating system."""
    release = Path("/etc/os-release")
    lines = release.read_text(encoding="utf-8").splitlines() if release.is_file() else []
    names = [line.split("=", 1)[1].strip('"') for line in lines if line.startswith("PRETTY_NAME=")]
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "distribution": names[0] if names else "unknown",
    }


def cpu(cpuinfo: Path) -> dict[str, Any]:
    """Return model name, flags and number of logical CPUs from /proc/cpuinfo."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    pairs = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    first = dict(reversed(pairs))
    return {
        "model": first.get("model name", "unknown"),
        "logical_cpus": sum(key == "processor" for key, _ in pairs),
        "allowed_cpus": len(os.sched_getaffinity(0)),
        "flags": sorted(first.get("flags", "").split()),
    }


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that influence serving; values of those that may hold a secret are masked."""
    kept = {name: value for name, value in sorted(environ.items()) if _KEPT_VARIABLES.search(name)}
    return {name: MASK if _SECRET_NAME.search(name) and value else value for name, value in kept.items()}


class Scrubber:
    """Replaces the home folder, the user's and the machine's name, and what looks like a token, in any text.

    The user's name is replaced where it is part of a path or an address, the machine's wherever it is a word.
    """

    def __init__(self, home: str, user: str, host: str) -> None:
        self._home = home.rstrip("/")
        self._user = user
        self._hosts = [name for name in (host, host.split(".", maxsplit=1)[0]) if name not in ("", "localhost")]

    @classmethod
    def of_this_machine(cls) -> Scrubber:
        """Take the names from the operating system."""
        home = str(Path.home())
        return cls(home, os.environ.get("USER") or os.environ.get("LOGNAME") or Path(home).name, socket.gethostname())

    def scrub(self, text: str) -> str:
        """Return `text` without them."""
        if len(self._home) > 1:
            text = re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text)
        if self._user:
            text = re.sub(rf"(?<=/){re.escape(self._user)}(?![\w.-])|\b{re.escape(self._user)}(?=@)", "USER", text)
        for host in self._hosts:
            text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text)
        return _TOKEN_VALUE.sub(MASK, _URL_LOGIN.sub(f"{MASK}@", text))

    def scrub_all(self, data: Any) -> Any:
        """Return JSON-like `data` with every text in it scrubbed; keys are kept."""
        if isinstance(data, dict):
            return {key: self.scrub_all(value) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.scrub_all(value) for value in data]
        return self.scrub(data) if isinstance(data, str) else data


def write_report(path: Path, facts: Facts, findings: Iterable[Finding]) -> None:
    """Write the report as JSON; raises OSError when the file cannot be written."""
    text = json.dumps(build_report(facts, findings), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
