"""Registration of parsers into vLLM's tables."""

import pytest

from vllm_kunlun import parsers
from vllm_kunlun.parsers import ParserClass, register_into


class Registry:
    def __init__(self, **lazy_parsers):
        self.lazy_parsers = lazy_parsers

    def register_lazy_module(self, name, module_path, class_name):
        self.lazy_parsers[name] = (module_path, class_name)


def test_registering_twice_is_registering_once():
    registry = Registry(other=("vllm.x", "X"))
    for _ in range(2):
        register_into(registry, {"mine": ParserClass("package.module", "Parser")})
    assert registry.lazy_parsers == {"other": ("vllm.x", "X"), "mine": ("package.module", "Parser")}


def test_parser_of_vllm_is_not_replaced():
    registry = Registry(qwen3=("vllm.reasoning.qwen3", "Qwen3"))
    with pytest.raises(ValueError, match="vLLM already has a parser named qwen3"):
        register_into(registry, {"qwen3": ParserClass("package.module", "Parser")})


@pytest.mark.parametrize(
    ("table", "register", "manager"),
    [
        ("REASONING_PARSERS", parsers.register_reasoning_parsers, "vllm.reasoning.ReasoningParserManager"),
        ("TOOL_PARSERS", parsers.register_tool_parsers, "vllm.tool_parsers.ToolParserManager"),
    ],
)
def test_tables_reach_the_managers_of_vllm(monkeypatch, table, register, manager):
    module, name = manager.rsplit(".", 1)
    registry = getattr(pytest.importorskip(module), name)
    monkeypatch.setattr(registry, "lazy_parsers", dict(registry.lazy_parsers))
    monkeypatch.setattr(parsers, table, {"a_test_parser": ParserClass("package.module", "Parser")})
    register()
    assert registry.lazy_parsers["a_test_parser"] == ("package.module", "Parser")
