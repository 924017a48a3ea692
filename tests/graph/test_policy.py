"""Each graph rule alone, on the smallest config it reads."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from vllm_kunlun.platforms import graph_policy


def config(mode: CUDAGraphMode | None, **changes: Any) -> Any:
    compilation = SimpleNamespace(
        cudagraph_mode=mode, cudagraph_capture_sizes=None, max_cudagraph_capture_size=None, compile_sizes=None
    )
    parts = {
        "compilation_config": compilation,
        "lora_config": None,
        "model_config": SimpleNamespace(runner_type="generate"),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=8192),
    }
    return SimpleNamespace(**{**parts, **changes})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.INFO, "vllm.kunlun")
    return caplog


@pytest.mark.parametrize("asked", list(CUDAGraphMode))
def test_modes_with_pieces_become_full_and_the_others_stay(asked: CUDAGraphMode, log: Any) -> None:
    c = config(asked)
    graph_policy.whole_steps(c)
    pieces = asked in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)
    assert c.compilation_config.cudagraph_mode == (CUDAGraphMode.FULL if pieces else asked)
    assert (f"{asked.name} was resolved to FULL" in log.text) == pieces


def test_the_default_is_full() -> None:
    c = config(None)
    graph_policy.whole_steps(c)
    assert c.compilation_config.cudagraph_mode == CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("batched", "largest", "count"), [(8192, 256, 52), (100, 100, 41), (7, 7, 7)], ids=["usual", "few", "very few"]
)
def test_small_sizes_are_exact_and_none_is_beyond_a_step(batched: int, largest: int, count: int) -> None:
    c = config(CUDAGraphMode.FULL, scheduler_config=SimpleNamespace(max_num_batched_tokens=batched))
    graph_policy.capture_sizes(c)
    sizes = c.compilation_config.cudagraph_capture_sizes
    assert sizes[: min(32, largest)] == list(range(1, min(32, largest) + 1))
    assert (sizes[-1], len(sizes)) == (largest, count)
    assert sizes == sorted(set(sizes))


def test_sizes_that_were_asked_for_stay() -> None:
    c = config(CUDAGraphMode.FULL)
    c.compilation_config.cudagraph_capture_sizes = [1, 5]
    graph_policy.capture_sizes(c)
    assert c.compilation_config.cudagraph_capture_sizes == [1, 5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"model_config": SimpleNamespace(runner_type="pooling")}, "pooling"),
        ({}, None),
    ],
    ids=["lora", "pooling", "plain"],
)
def test_what_python_decides_in_each_step_runs_without_graphs(
    changes: dict[str, Any], reason: str | None, log: Any
) -> None:
    c = config(CUDAGraphMode.FULL, **changes)
    c.compilation_config.cudagraph_capture_sizes = [1, 2]
    graph_policy.only_where_steps_can_be_captured(c)
    compilation = c.compilation_config
    if reason is None:
        assert (compilation.cudagraph_mode, compilation.cudagraph_capture_sizes) == (CUDAGraphMode.FULL, [1, 2])
    else:
        assert (compilation.cudagraph_mode, compilation.cudagraph_capture_sizes) == (CUDAGraphMode.NONE, [])
        assert "FULL was resolved to NONE" in log.text and reason in log.text
