"""The p800 code path on the emulator gives transformers' greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.prompts import PROMPTS
from tests.support.checkpoints import SMALL
from tests.support.demo import demo_checkpoint, demo_reference
from tests.support.emulated import EmulatedEngines, Job, Outcome
from tests.support.reference import Reference
from tests.support.tokens import TIE, assert_replay

QWEN3 = "qwen3-qk-norm"
SIZES = [1, 4, 8, 16]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"cudagraph_capture_sizes": SIZES}},
}
TIES = {"float32": TIE, "float16": 0.02}
"""Logits of the tiny models are about 1; in half precision they are off by a few thousandths."""

DEMO_TIES = {"float32": TIE, "float16": 0.1}
"""Its logits are about 20."""

Batches = Sequence[Sequence[Sequence[int]]]


def assert_tokens(reference: Reference, batches: Batches, outcome: Outcome, tie: float = TIE) -> None:
    assert len(outcome.tokens) == len(batches)
    for number, (batch, generated) in enumerate(zip(batches, outcome.tokens, strict=True)):
        for prompt, tokens in zip(batch, generated, strict=True):
            assert_replay(reference, prompt, tokens, f"batch {number}, prompt of {len(prompt)}", tie)


@pytest.mark.parametrize("generation", ["torch25", "torch29"])
@pytest.mark.parametrize("dtype", TIES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_one_sequence_and_of_batches(
    engines: EmulatedEngines,
    tiny: Callable[[str], Reference],
    batches: Batches,
    mode: str,
    dtype: str,
    generation: str,
) -> None:
    reference = tiny(QWEN3)
    flags = {"dtype": dtype, **MODES[mode]}
    outcome = engines.run(Job(reference.checkpoint, batches, flags=flags, settings={"GENERATION": generation}))
    assert f"22 ops by p800 ({generation})" in outcome.log
    assert_tokens(reference, batches, outcome, TIES[dtype])


def test_decode_steps_are_replayed_and_padding_is_clean(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches
) -> None:
    """Three sequences in a graph of four: the fourth row of every result is written too."""
    reference = tiny(QWEN3)
    outcome = engines.run(Job(reference.checkpoint, batches[1:2], flags=MODES["graphs"], num_tokens=5))
    assert outcome.graphs == SIZES
    assert outcome.replays == 4
    assert outcome.padding_is_finite
    assert_tokens(reference, batches[1:2], outcome)


def test_eager_steps_replay_nothing(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches
) -> None:
    outcome = engines.run(Job(tiny(QWEN3).checkpoint, batches[:1], flags=MODES["eager"], num_tokens=2))
    assert (outcome.graphs, outcome.replays) == ([], 0)


def test_batches_beyond_the_largest_graph_run_eagerly(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches
) -> None:
    reference = tiny(QWEN3)
    flags = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    outcome = engines.run(Job(reference.checkpoint, batches[1:2], flags=flags, num_tokens=3))
    assert outcome.replays == 0
    assert_tokens(reference, batches[1:2], outcome)


def test_a_step_waits_for_nothing(engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches) -> None:
    """Prefill, decode and mixed steps, under a guard that raises where the host waits for the device."""
    reference = tiny(QWEN3)
    flags = {**MODES["eager"], "max_num_batched_tokens": 32}
    outcome = engines.run(Job(reference.checkpoint, batches, flags=flags, num_tokens=4, guarded=True))
    assert_tokens(reference, batches, outcome)


LAYER = [
    *("add_rmsnorm", "matmul", "split_norm_rope_neox", "reshape_and_cache", "speculative_attention"),
    *("matmul", "add_rmsnorm", "matmul", "swiglu", "matmul"),
]
"""What a layer's decode launches, without the module's name."""


def test_a_decode_step_of_qwen3_takes_ten_launches_a_layer(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches
) -> None:
    reference = tiny(QWEN3)
    outcome = engines.run(Job(reference.checkpoint, batches[:1], flags=MODES["eager"], num_tokens=3, watched=True))
    layers = SMALL["num_hidden_layers"]
    embedding, first_layer = ["aten::_to_copy", "aten::index_select"], ["rmsnorm", *LAYER[1:]]
    expected = [*first_layer, *LAYER * (layers - 1), LAYER[0]]
    assert outcome.launches == [*embedding, *(f"kunlun_ops.{name}" for name in expected)]
    assert outcome.syncs == []
    assert_tokens(reference, batches[:1], outcome)


@pytest.mark.parametrize("name", ["llama-mqa", "qwen2-qkv-bias", "mistral-sliding-window", "glm-partial-rotary"])
def test_other_structures(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches, name: str
) -> None:
    reference = tiny(name)
    outcome = engines.run(Job(reference.checkpoint, batches[1:], flags=MODES["graphs"], num_tokens=5))
    assert_tokens(reference, batches[1:], outcome)


@pytest.mark.parametrize(
    ("mode", "dtype", "count"),
    [
        ("graphs", "float32", 5),
        *(
            pytest.param(mode, dtype, count, marks=pytest.mark.slow)
            for mode in MODES
            for dtype in DEMO_TIES
            for count in (1, 16)
        ),
    ],
)
def test_the_demo_model(engines: EmulatedEngines, mode: str, dtype: str, count: int) -> None:
    reference = demo_reference()
    prompts = [[reference.encode(text) for text in PROMPTS[:count]]]
    assert len(prompts[0]) == count
    flags = {**MODES[mode], "dtype": dtype, "kv_cache_memory_bytes": 64 << 20}
    outcome = engines.run(Job(demo_checkpoint(), prompts, flags=flags))
    assert (outcome.replays > 0) == (mode == "graphs")
    assert_tokens(reference, prompts, outcome, DEMO_TIES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(engines: EmulatedEngines, tiny: Callable[[str], Reference], batches: Batches, mode: str) -> None:
    reference = tiny(QWEN3)
    flags = {**MODES[mode], "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    outcome = engines.run(Job(reference.checkpoint, batches[:2], flags=flags, num_tokens=4))
    assert_tokens(reference, batches[:2], outcome)


def test_a_soft_cap_is_refused_before_weights_load(
    engines: EmulatedEngines, tiny: Callable[[str], Reference], tmp_path: Path
) -> None:
    outcome = engines.attempt(Job(tiny("gemma2-softcap").checkpoint, []))
    assert outcome.error is not None
    assert "no soft cap" in outcome.error
    assert "Loading weights" not in outcome.log
