"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One result. `fix` says what to do and is empty only where nothing is wrong. "fail" means: it will not serve."""

    name: str
    status: Status
    value: str
    fix: str = ""


def ok(name: str, value: str) -> Finding:
    """Nothing is wrong."""
    return Finding(name, "ok", value)


def warn(name: str, value: str, fix: str) -> Finding:
    """It serves, but slower, or only by luck."""
    return Finding(name, "warn", value, fix)


def fail(name: str, value: str, fix: str) -> Finding:
    """It will not serve."""
    return Finding(name, "fail", value, fix)
