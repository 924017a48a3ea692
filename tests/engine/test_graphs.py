"""Steps that Kunlun Graph replays give the tokens that eager steps give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.support.engine import engine, generate, greedy
from vllm_kunlun.graph.host_graph import HostGraphWrapper

SIZES = [1, 2, 4, 6]
NUM_TOKENS = 12


def random_prompts(count: int, seed: int) -> list[list[int]]:
    random.seed(seed)
    return [[random.randrange(1000, 40000) for _ in range(random.randrange(3, 90))] for _ in range(count)]


def model_of(llm: LLM) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.model


def outputs(checkpoint: Path, batches: list[list[list[int]]], **flags: Any) -> tuple[list[Any], dict[Any, list[str]]]:
    """The tokens of each batch, and the ops of each graph."""
    with engine(checkpoint, **flags) as llm:
        tokens = [generate(llm, batch, greedy(NUM_TOKENS)) for batch in batches]
        model = model_of(llm)
        return tokens, model.captured_ops() if isinstance(model, HostGraphWrapper) else {}


@pytest.fixture(scope="module")
def batches() -> list[list[list[int]]]:
    """Every number of sequences up to one beyond the largest graph, and twice as many as run at once."""
    return [random_prompts(count, seed=count) for count in (1, 2, 3, 4, 5, 6, 7, 32)]


@pytest.fixture(scope="module")
def eager(checkpoint: Path, batches: list[list[list[int]]]) -> list[Any]:
    tokens, graphs = outputs(checkpoint, batches, enforce_eager=True)
    assert graphs == {}
    return tokens


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_graphs_and_eager_steps_agree(
    checkpoint: Path, batches: list[list[list[int]]], eager: list[Any], mode: str
) -> None:
    config = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    tokens, graphs = outputs(checkpoint, batches, compilation_config=config)
    assert {batch.num_tokens for batch in graphs} == set(SIZES)
    assert tokens == eager


def test_every_size_with_default_settings(checkpoint: Path, batches: list[list[list[int]]], eager: list[Any]) -> None:
    """Mixed batches and chunks are captured too: the largest step has 64 tokens."""
    tokens, graphs = outputs(checkpoint, batches)
    assert {batch.num_tokens for batch in graphs} >= {1, 2, 3, 4, 5, 6, 7, 64}
    assert tokens == eager


def test_a_decode_step_has_at_most_ten_ops_per_layer_and_none_of_torch(checkpoint: Path) -> None:
    _, graphs = outputs(checkpoint, [random_prompts(1, seed=0)])
    (ops,) = [names for batch, names in graphs.items() if batch.num_tokens == 1]
    layers = 30
    assert len([name for name in ops if name.startswith("kunlun::")]) <= 10 * layers + 3
    assert [name for name in ops if not name.startswith("kunlun::")] in ([], ["aten::to.dtype"])


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eager: list[Any],
    batches: list[list[list[int]]],
) -> None:  # fmt: skip
    from vllm.model_executor.models.llama import LlamaModel

    forward = LlamaModel.forward

    def deciding(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(self, *args, **kwargs)
        return hidden if hidden.isfinite().all().item() else hidden.nan_to_num()

    monkeypatch.setattr(LlamaModel, "forward", deciding)
    tokens, graphs = outputs(checkpoint, batches[:2])
    assert "FULL was resolved to NONE: Kunlun Graph cannot capture aten::item" in caplog.text
    assert graphs == {}
    assert tokens == eager[:2]
