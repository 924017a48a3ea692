"""Reasoning and tool-call parsers of this plugin, registered by name so that a parser's module loads when it is used.

vLLM brings parsers for the model families it knows; the tables here hold only what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ParserClass:
    """Where a parser class is found: a module's full name and the class in it."""

    module: str
    name: str


REASONING_PARSERS: Mapping[str, ParserClass] = {}
TOOL_PARSERS: Mapping[str, ParserClass] = {}


class LazyRegistry(Protocol):
    """The part of vLLM's parser managers that registration needs."""

    lazy_parsers: dict[str, tuple[str, str]]

    def register_lazy_module(self, name: str, module_path: str, class_name: str) -> None:
        """Remember where the parser `name` is found."""


def register_into(registry: LazyRegistry, parsers: Mapping[str, ParserClass]) -> None:
    """Add `parsers` to a registry of vLLM; adding the same ones again changes nothing.

    Raises ValueError when vLLM already has another parser of that name: an entry here must not change its meaning.
    """
    for name, parser in parsers.items():
        place = (parser.module, parser.name)
        if registry.lazy_parsers.get(name, place) != place:
            raise ValueError(f"vLLM already has a parser named {name}; remove it from vllm_kunlun.parsers")
        registry.register_lazy_module(name, *place)


def register_reasoning_parsers() -> None:
    """Register REASONING_PARSERS with vLLM."""
    from vllm.reasoning import ReasoningParserManager

    register_into(ReasoningParserManager, REASONING_PARSERS)


def register_tool_parsers() -> None:
    """Register TOOL_PARSERS with vLLM."""
    from vllm.tool_parsers import ToolParserManager

    register_into(ToolParserManager, TOOL_PARSERS)
