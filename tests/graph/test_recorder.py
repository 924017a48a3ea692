"""The recorder of the host target alone: what it replays, what it refuses, and the memory it uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_kunlun import ops
from vllm_kunlun.ops.native import library

Step = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs steps."""
    ops.activate()
    with torch.inference_mode():
        yield


@pytest.fixture
def graphs() -> Any:
    library.load()
    return torch.classes.kunlun_host.Graphs()


def capture(graphs: Any, step: Step, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The number of the graph and its output, whose memory the graph may use again."""
    graphs.begin()
    try:
        output = step(x)
        return graphs.end(), graphs.alias(output)
    finally:
        graphs.cancel()


def norm_and_product(x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 48 * 33).view(48, 33)
    normed = torch.empty_like(x)
    torch.ops.kunlun.rms_norm(normed, x, torch.full((33,), 0.5), 1e-6, 0.0)
    out = torch.empty(x.shape[0], 48)
    torch.ops.kunlun.linear(out, normed, weight, None)
    return out


def halves_and_copies(x: torch.Tensor) -> torch.Tensor:
    left, right = x.split([16, 17], dim=-1)
    turned = left.t().reshape(-1)  # copies
    best, index = right.topk(3, dim=-1)
    mixed = torch.cat([best, index.to(best.dtype)], dim=-1)
    mixed[:, 0] += turned[: x.shape[0]]
    return mixed.mul_(2) + 1


STEPS = [norm_and_product, halves_and_copies, lambda x: x.view(-1)[3:], lambda x: torch.where(x > 0, x, -x).sum(dim=1)]


@pytest.mark.parametrize("step", STEPS, ids=["norm_and_product", "halves_and_copies", "view", "where"])
def test_a_replay_computes_what_the_step_computes(graphs: Any, step: Step) -> None:
    x = torch.randn(7, 33)
    number, output = capture(graphs, step, x)
    for _ in range(3):
        output.fill_(torch.nan)
        x.copy_(torch.randn(7, 33))
        expected = step(x)
        graphs.replay(number)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_the_capture_itself_is_a_step(graphs: Any) -> None:
    x = torch.randn(7, 33)
    graphs.begin()
    output = halves_and_copies(x)
    graphs.end()
    torch.testing.assert_close(output, halves_and_copies(x), rtol=0, atol=0)


def test_views_and_allocations_are_not_replayed(graphs: Any) -> None:
    number, _ = capture(graphs, norm_and_product, torch.randn(7, 33))
    names = [name for name in graphs.op_names(number) if not name.startswith("aten::")]
    assert names == ["kunlun::rms_norm", "kunlun::linear"]
    number, _ = capture(graphs, lambda x: x.view(-1)[3:].unsqueeze(0), torch.randn(7, 33))
    assert graphs.op_names(number) == []


REFUSED: dict[str, Step] = {
    "aten::item": lambda x: x * x[0, 0].item(),
    "aten::nonzero": lambda x: x.nonzero(),
    "aten::index": lambda x: x[x > 0],
    "aten::masked_select": lambda x: x.masked_select(x > 0),
    "aten::equal": lambda x: x + float(torch.equal(x, x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_decides_on_is_refused_by_name(graphs: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"Kunlun Graph cannot capture {name}"):
        capture(graphs, REFUSED[name], torch.randn(4, 4))
    assert torch.ones(3).sum().item() == 3, "recording must have ended"


def test_indexing_with_numbers_is_captured(graphs: Any) -> None:
    x, rows = torch.randn(5, 3), torch.tensor([4, 0])
    number, output = capture(graphs, lambda x: x[rows], x)
    rows.copy_(torch.tensor([1, 2]))
    graphs.replay(number)
    torch.testing.assert_close(output, x[1:3], rtol=0, atol=0)


def test_memory_is_used_again_within_a_capture_and_by_the_next(graphs: Any) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            out = torch.empty_like(x)
            torch.ops.kunlun.rms_norm(out, x, torch.ones(256), 1e-6, 0.0)
            x = out
        return x

    capture(graphs, chain, torch.randn(64, 256))
    size = graphs.pool_bytes()
    assert size <= 4 * 64 * 256 * 4
    capture(graphs, chain, torch.randn(64, 256))
    capture(graphs, chain, torch.randn(48, 256))
    assert graphs.pool_bytes() == size


def test_other_threads_are_not_recorded(graphs: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: torch.randn(3).mul_(2).sum().item())
        other.start()
        other.join()
        return x.add(1)

    number, _ = capture(graphs, step, torch.randn(2))
    assert graphs.op_names(number) == ["aten::add.Tensor"]


def test_an_error_of_an_op_ends_the_recording(graphs: Any) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        capture(graphs, lambda x: x + torch.ones(5), torch.randn(4))
    number, _ = capture(graphs, lambda x: x + 1, torch.randn(4))
    assert graphs.op_names(number) == ["aten::add.Tensor"]


def test_recording_twice_at_once_is_refused(graphs: Any) -> None:
    graphs.begin()
    try:
        with pytest.raises(RuntimeError, match="recording already"):
            torch.classes.kunlun_host.Graphs().begin()
    finally:
        graphs.cancel()
