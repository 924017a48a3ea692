"""Speed of the matrix products beside torch's own, on the shapes of two small models.

``linear_table()`` prints it. Weights come from several copies in turn, as a model's layers do, so that they are read
from memory and not from a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from vllm_kunlun import ops

# (in features, out features): SmolLM2-135M's layers and head, then Qwen3-0.6B's layers.
SHAPES = (
    (576, 960),
    (576, 576),
    (576, 3072),
    (1536, 576),
    (576, 49152),
    (1024, 4096),
    (2048, 1024),
    (1024, 6144),
    (3072, 1024),
)
TOKENS = (1, 4, 16, 64, 256, 1024)
_COPIES_BYTES = 300 << 20
_SECONDS = 0.1
_ROUNDS = 4
_SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class LinearTiming:
    """Median seconds of one product of `tokens` rows with a weight [out_features, in_features]."""

    in_features: int
    out_features: int
    tokens: int
    weight_bytes: int
    ours: float
    torch: float

    @property
    def operations(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * self.tokens * self.in_features * self.out_features


def _weights(in_features: int, out_features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    first = torch.randn(out_features, in_features).to(dtype)
    copies = min(40, max(2, _COPIES_BYTES // first.nbytes))
    return [first, *(first.clone() for _ in range(copies - 1))]


def _seconds(product: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> list[float]:
    """Runs `product` for a while with one weight after the other. Waits first, until the other's threads sleep."""
    time.sleep(_SETTLE_SECONDS)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS / _ROUNDS
    while time.perf_counter() < end or len(times) < 2:
        started = time.perf_counter()
        product(weights[len(times) % len(weights)])
        times.append(time.perf_counter() - started)
    return times[1:]


def _time(in_features: int, weights: list[torch.Tensor], tokens: int) -> LinearTiming:
    x = torch.randn(tokens, in_features).to(weights[0].dtype)
    out = torch.empty(tokens, weights[0].shape[0], dtype=x.dtype)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(_ROUNDS):
        ours += _seconds(lambda weight: torch.ops.kunlun.linear(out, x, weight, None), weights)
        theirs += _seconds(lambda weight: torch.nn.functional.linear(x, weight), weights)
    return LinearTiming(in_features, out.shape[1], tokens, weights[0].nbytes, median(ours), median(theirs))


def linear_timings(dtype: torch.dtype = torch.bfloat16) -> Iterator[LinearTiming]:
    """Times every shape and number of tokens; the two products take turns."""
    ops.activate()
    for in_features, out_features in SHAPES:
        weights = _weights(in_features, out_features, dtype)
        for tokens in TOKENS:
            yield _time(in_features, weights, tokens)


def linear_table(dtype: torch.dtype = torch.bfloat16) -> None:
    """Prints, for every shape and number of tokens, GB/s of weights and GFLOP/s of the op and of torch."""
    table = Table("in → out", "tokens", "GB/s", "torch", "GFLOP/s", "torch", "times faster", title=f"linear, {dtype}")
    for t in linear_timings(dtype):
        rates = [f"{t.weight_bytes / s / 1e9:.1f}" for s in (t.ours, t.torch)]
        speeds = [f"{t.operations / s / 1e9:.0f}" for s in (t.ours, t.torch)]
        table.add_row(f"{t.in_features} → {t.out_features}", str(t.tokens), *rates, *speeds, f"{t.torch / t.ours:.2f}")
    Console().print(table)
