"""Puts stand-ins in the place of modules and attributes, and takes them out again.

Only the emulator uses it: it stands in for the vendor's libraries and for the device interface of torch that they fill.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_ABSENT = object()


class StandInTargetMissing(AttributeError):
    """The attribute to replace does not exist: torch changed, and the stand-in must be reviewed."""


class StandIns:
    """What was replaced, in order; `undo` puts it back."""

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, Any]] = []
        self._modules: list[tuple[str, ModuleType | None]] = []

    def attribute(self, holder: Any, name: str, value: Any) -> Any:
        """Replaces an attribute and returns what it was; raises StandInTargetMissing where there is none."""
        if not hasattr(holder, name):
            raise StandInTargetMissing(
                f"{getattr(holder, '__name__', holder)}.{name} is to be replaced and is not there"
            )
        original = getattr(holder, name)
        self._attributes.append((holder, name, original))
        setattr(holder, name, value)
        return original

    def new_attribute(self, holder: Any, name: str, value: Any) -> None:
        """Adds an attribute that is not there."""
        self._attributes.append((holder, name, _ABSENT))
        setattr(holder, name, value)

    def module(self, name: str, module: ModuleType) -> None:
        """Makes `import name` give `module`."""
        self._modules.append((name, sys.modules.get(name)))
        sys.modules[name] = module

    def undo(self) -> None:
        """Puts back everything, last first."""
        while self._attributes:
            holder, name, original = self._attributes.pop()
            if original is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        while self._modules:
            name, module = self._modules.pop()
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
