"""Time of one case: informative, judged by nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op
from vllm_kunlun.tools.selftest.judging import on_device, poisoned, wait
from vllm_kunlun.tools.selftest.results import Timing

_SECONDS = 0.05
_LEAST_RUNS = 5

# Tables of which a call reads or writes a part that its shapes do not tell; they do not count as moved.
_IN_PART: Mapping[str, tuple[str, ...]] = {
    "embedding": ("weight",),
    "reshape_and_cache": ("key_cache", "value_cache"),
    "rotary_embedding": ("cos_sin_cache",),
    "slot_mapping": ("block_table",),
    "split_norm_rope": ("cos_sin_cache",),
    "zero_blocks": ("kv_cache",),
}


def moved_bytes(op: Op, case: Case) -> int | None:
    """Bytes of the tensors of a call, each once; those read and written in place twice. None where none are left."""
    left_out = _IN_PART.get(op.name, ())
    total = sum(
        value.numel() * value.element_size() * (2 if name in op.mutated and not name.startswith("out") else 1)
        for name, value in case.args.items()
        if isinstance(value, Tensor) and name not in left_out
    )
    return None if op.name == "zero_blocks" else total


def operations(op: Op, case: Case) -> int | None:
    """Multiplications and additions of a matrix product or of attention over all pairs; None for other ops."""
    args = case.args
    if op.name in ("linear", "logits"):
        rows = args["input" if op.name == "linear" else "hidden"].size(0)
        return 2 * rows * args["weight"].numel()
    if op.name not in ("paged_attention", "varlen_attention"):
        return None
    heads, size = args["query"].shape[1:]
    return 4 * heads * size * sum(q * k for q, k in zip(*_lengths(args), strict=False))


def _lengths(args: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    queries = [last - first for first, last in pairwise(args["query_start_loc"].tolist())]
    if "seq_lens" in args:
        return queries, args["seq_lens"].tolist()
    return queries, [last - first for first, last in pairwise(args["key_start_loc"].tolist())]


def work(op: Op, case: Case) -> int:
    """A number by which the cases of one op are compared."""
    return operations(op, case) or moved_bytes(op, case) or 0


def time_case(op: Op, case: Case, function: Callable[..., None], device: torch.device) -> Timing:
    """The median of several runs of one call on the same memory."""
    arguments = list(on_device(poisoned(op, case), device).values())
    function(*arguments)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < _LEAST_RUNS:
        wait(device)
        started = time.perf_counter()
        function(*arguments)
        wait(device)
        times.append(time.perf_counter() - started)
    dtype = str(case.dtype).removeprefix("torch.")
    return Timing(case.name, dtype, median(times), moved_bytes(op, case), operations(op, case))
