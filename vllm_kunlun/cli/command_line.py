"""Looks flags up in a command line that vLLM's own parser will read, without importing vLLM.

It knows as much of the syntax as a look-up needs: dashes or underscores in names, ``--flag value`` and
``--flag=value``, the last occurrence wins, and flags from a ``--config`` file, which the command line overrides.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kunlun.cli.screen import CommandError


def flag_name(token: str) -> str | None:
    """Return a token's flag with dashes in its name (``--max_num_seqs=8`` gives ``--max-num-seqs``), None for others.

    Dotted names of JSON flags keep only their first part; a negative number is a value.
    """
    if not token.startswith("-") or token.strip("-") == "" or _is_number(token):
        return None
    dashes = "--" if token.startswith("--") else "-"
    name = token[len(dashes) :].split("=", 1)[0].split(".", 1)[0]
    return dashes + (name.replace("_", "-") if dashes == "--" else name)


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class CommandLine:
    """`arguments` as the user gave them, and the content of the ``--config`` file they name."""

    arguments: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, arguments: Sequence[str]) -> CommandLine:
        """Take `arguments` and load the file that their ``--config`` names; raises CommandError when it cannot be."""
        bare = cls(tuple(arguments))
        path = bare.value("--config")
        return bare if path is None else cls(bare.arguments, _load_config(Path(path)))

    def flags(self) -> list[str]:
        """List the names of all flags on the command line, in order."""
        return [name for name in map(flag_name, self.arguments) if name is not None]

    def has(self, *names: str) -> bool:
        """Tell whether one of the flags is on the command line or in the file."""
        return bool(set(names) & set(self.flags())) or any(name.removeprefix("--") in self.config for name in names)

    def value(self, *names: str) -> str | None:
        """Return the text of the last one of these flags, or the file's; None when there is none or it has no value."""
        found = None
        for token, following in zip(self.arguments, (*self.arguments[1:], ""), strict=False):
            if flag_name(token) in names:
                found = token.split("=", 1)[1] if "=" in token else following
        if found is None:
            found = next((str(self.config[key]) for key in _keys(names) if key in self.config), None)
        return found or None

    def leading_positional(self) -> str | None:
        """Return the first token when it is not a flag."""
        if self.arguments and flag_name(self.arguments[0]) is None:
            return self.arguments[0]
        return None

    def may_have_positional(self) -> bool:
        """Tell whether some token could be a positional argument: one that no flag with ``=`` carries."""
        return any(flag_name(token) is None for token in self.arguments)


def _keys(names: Iterable[str]) -> list[str]:
    return [name.removeprefix("--") for name in names if name.startswith("--")]


def _load_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CommandError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CommandError(f"--config {path} must hold flags and their values, one `flag: value` a line")
    return {str(key).replace("_", "-"): value for key, value in content.items()}


def unknown_flags(command: CommandLine, known: Iterable[str]) -> dict[str, list[str]]:
    """Map each flag of `command` that is not `known`, nor the start of a known one, to the most similar known ones."""
    names = {name.lstrip("-"): name for name in sorted(known)}
    strangers = [flag for flag in command.flags() if not any(name.startswith(flag) for name in names.values())]
    return {flag: _similar(flag.lstrip("-"), names) for flag in strangers}


def _similar(word: str, names: Mapping[str, str]) -> list[str]:
    return [names[name] for name in difflib.get_close_matches(word, names, n=2, cutoff=0.7)]
