"""The wrapper around a model: when a step is captured, replayed, run eagerly or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from vllm_kunlun.graph import host_graph
from vllm_kunlun.graph.host_graph import CannotCapture, HostGraphWrapper


@dataclass
class Step:
    """Metadata as the attention backend makes it."""

    seq_lens: torch.Tensor


class Model:
    """Adds the lengths of the step to its input; counts how often Python runs it."""

    def __init__(self, context: Any) -> None:
        self.context, self.calls, self.reads = context, 0, False

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        factor = positions.sum().item() if self.reads else 2
        return positions * factor + self.context.attn_metadata["layer"].seq_lens


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = SimpleNamespace(
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=BatchDescriptor(num_tokens=3),
        attn_metadata={"layer": Step(torch.arange(3.0)), "other": Step(torch.arange(3.0))},
    )
    monkeypatch.setattr(host_graph, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(host_graph, "get_forward_context", lambda: made)
    with torch.inference_mode():
        yield made


@pytest.fixture
def wrapped(context: Any) -> HostGraphWrapper:
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace())
    return HostGraphWrapper(Model(context), config)


def test_a_second_step_is_replayed_from_what_lies_in_its_inputs(wrapped: HostGraphWrapper, context: Any) -> None:
    positions = torch.randn(3)
    wrapped(positions=positions)
    positions.copy_(torch.randn(3))
    context.attn_metadata["layer"].seq_lens.copy_(torch.randn(3))
    expected = positions * 2 + context.attn_metadata["layer"].seq_lens
    torch.testing.assert_close(wrapped(positions=positions), expected, rtol=0, atol=0)
    assert wrapped.runnable.calls == 1


@pytest.mark.parametrize("moved", ["argument", "metadata"])
def test_inputs_that_moved_are_refused(wrapped: HostGraphWrapper, context: Any, moved: str) -> None:
    positions = torch.randn(3)
    wrapped(positions=positions)
    if moved == "metadata":
        context.attn_metadata["other"].seq_lens = torch.zeros(3)
    with pytest.raises(RuntimeError, match="moved since the capture"):
        wrapped(positions=positions.clone() if moved == "argument" else positions)


def test_each_batch_has_its_own_graph_and_other_modes_none(wrapped: HostGraphWrapper, context: Any) -> None:
    positions = torch.randn(3)
    wrapped(positions=positions)
    context.batch_descriptor = BatchDescriptor(num_tokens=3, uniform=True)
    wrapped(positions=positions)
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    wrapped(positions=positions)
    assert wrapped.runnable.calls == 3
    assert len(wrapped.captured_ops()) == 2


def test_a_refusal_leaves_no_graph_and_no_recording(wrapped: HostGraphWrapper) -> None:
    wrapped.runnable.reads = True
    with pytest.raises(CannotCapture, match="aten::item"):
        wrapped(positions=torch.ones(3))
    assert wrapped.captured_ops() == {}
    wrapped.runnable.reads = False
    wrapped(positions=torch.ones(3))
    assert len(wrapped.captured_ops()) == 1


def test_clearing_gives_the_memory_back(wrapped: HostGraphWrapper) -> None:
    wrapped(positions=torch.ones(3))
    assert wrapped.memory() > 0
    wrapped.clear_graphs()
    assert (wrapped.memory(), wrapped.captured_ops()) == (0, {})
