"""Version of this distribution, and what this release supports: targets and versions of other packages, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

__version__ = "0.25.1.dev0"

IMPLEMENTED_TARGETS = frozenset({"host", "p800", "emulated"})
"""Targets this release can run. Another one joins when a server runs on it, not when its first module is there."""


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numeric release part of a version: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``.

    Pre-release, development and local parts are left out. Raises ValueError when no number leads the text.
    """
    numbers: list[int] = []
    for part in version.split("+", 1)[0].split("."):
        digits = _leading_digits(part)
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    if not numbers:
        raise ValueError(f"{version!r} does not start with a version number")
    return tuple(numbers)


def _leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]


@dataclass(frozen=True)
class VersionRange:
    """Supported releases of one package: ``minimum <= version < below``."""

    package: str
    minimum: str
    below: str

    def contains(self, version: str) -> bool:
        """Tell whether the release numbers of `version` lie in the range."""
        return _compare(self.minimum, version) <= 0 and _compare(version, self.below) < 0

    def __str__(self) -> str:
        return f">={self.minimum},<{self.below}"


def _compare(left: str, right: str) -> int:
    pairs = zip_longest(release_numbers(left), release_numbers(right), fillvalue=0)
    return next((a - b for a, b in pairs if a != b), 0)


SUPPORTED_PYTHON = VersionRange("python", "3.10", "3.14")
SUPPORTED_TORCH = VersionRange("torch", "2.9", "2.14")
SUPPORTED_VLLM = VersionRange("vllm", "0.25.1", "0.25.2")
SUPPORTED_TRANSFORMERS = {"0.25.1": VersionRange("transformers", "5.5.3", "5.25")}
"""Transformers releases by vLLM release."""
