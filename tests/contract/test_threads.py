"""Kernels on more threads than there are CPUs: threads that are held up, and tasks that others take from them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from vllm_kunlun import ops
from vllm_kunlun.ops.native import library


@pytest.fixture(params=[0, 200])
def crowd(request: pytest.FixtureRequest) -> Iterator[None]:
    ops.table()
    library.configure_threads([], 2 * len(os.sched_getaffinity(0)) + 1, request.param)
    yield
    library.configure_threads([], 1, 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [31, 33, 257, 1031])
def test_every_task_is_done_once_however_threads_are_held_up(rows: int, crowd: None) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 96, generator=generator)
    for tokens in range(1, 80):
        x = torch.randn(tokens, 96, generator=generator)
        out = torch.full((tokens, rows), float("nan"))
        torch.ops.kunlun.linear(out, x, weight, None)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
