"""The patch ledger: every attribute of vLLM or torch that is replaced, as data, with the reason and its expiry."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet

_APPLIED: dict[str, Any] = {}


class PatchTargetMissing(RuntimeError):
    """The attribute to replace does not exist: vLLM or torch changed, and the entry must be reviewed."""


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    ``target`` is ``module:attribute`` (attribute may be dotted), ``make`` gets the original and returns its
    replacement, ``distribution`` and ``versions`` say where it is needed, ``test`` names the test that fails once it
    can be deleted.
    """

    target: str
    reason: str
    distribution: str
    versions: str
    test: str
    make: Callable[[Any], Any]

    def wanted(self) -> bool:
        """Whether the installed version needs the patch."""
        return SpecifierSet(self.versions, prereleases=True).contains(version(self.distribution).split("+")[0])


@dataclass(frozen=True)
class Gap:
    """A function that an older torch lacks: ``make`` gives it; ``target``, ``reason`` and ``test`` as in a Patch."""

    target: str
    reason: str
    test: str
    make: Callable[[], Any]


def fill(gap: Gap) -> None:
    """Adds the function where the installed release has none."""
    module_name, _, path = gap.target.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    if not hasattr(holder, name):
        setattr(holder, name, gap.make())


def _holder(patch: Patch) -> tuple[Any, str]:
    module_name, _, path = patch.target.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent, None)
    if holder is None or not hasattr(holder, name):
        raise PatchTargetMissing(
            f"{patch.target} is missing in {patch.distribution} {version(patch.distribution)};"
            f" the patch for it ({patch.reason}) must be reviewed"
        )
    return holder, name


def apply(patch: Patch) -> None:
    """Replaces the target once per process. Raises PatchTargetMissing when it is not there."""
    if patch.target in _APPLIED or not patch.wanted():
        return
    holder, name = _holder(patch)
    original = getattr(holder, name)
    setattr(holder, name, patch.make(original))
    _APPLIED[patch.target] = original


def original(patch: Patch) -> Any:
    """What the target was before it was replaced, or is if the patch was not applied."""
    if patch.target in _APPLIED:
        return _APPLIED[patch.target]
    holder, name = _holder(patch)
    return getattr(holder, name)
