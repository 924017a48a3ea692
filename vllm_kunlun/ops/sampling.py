"""From logits to token ids: filters, greedy and random choice. Logits are float32 [B, V], rows may be strided."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define

# Further below the row's maximum than this, a token has a probability below 2e-38, which counts as zero.
NEGLIGIBLE = -87.0

# A temperature below this means greedy choice (vLLM's bound).
GREEDY_TEMPERATURE = 1e-5


def _without_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), -torch.inf)


def _k_threshold(ascending: Tensor, top_k: Tensor) -> Tensor:
    vocab = ascending.size(1)
    k = top_k.long().where((top_k >= 1) & (top_k <= vocab), vocab)
    return ascending.gather(1, (vocab - k).unsqueeze(1))


def _outside_nucleus(ascending: Tensor, top_p: Tensor) -> Tensor:
    p = top_p.double().unsqueeze(1)
    outside = (ascending.double().softmax(-1).cumsum(-1) <= 1 - p) & (p < 1)
    outside[:, -1] = False
    return outside


def _top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    vocab = logits.size(1)
    active = torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
    values, order = _without_nan(logits).clamp_max(torch.finfo(torch.float32).max).sort(dim=-1, stable=True)
    if top_k is not None:
        active |= (top_k >= 1) & (top_k < vocab)
        values = values.masked_fill(values < _k_threshold(values, top_k), -torch.inf)
    if top_p is not None:
        active |= top_p < 1
        values = values.masked_fill(_outside_nucleus(values, top_p), -torch.inf)
    outside = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, values == -torch.inf)
    logits.masked_fill_(outside & active.unsqueeze(1), -torch.inf)


def _temperature(logits: Tensor, temperature: Tensor) -> None:
    logits.div_(temperature.where(temperature >= GREEDY_TEMPERATURE, 1.0).unsqueeze(1))


def _min_p(logits: Tensor, min_p: Tensor) -> None:
    threshold = _without_nan(logits).amax(-1) + min_p.log().clamp_max(0)
    outside = ~(logits >= threshold.unsqueeze(1)) & (min_p > 0).unsqueeze(1)
    logits.masked_fill_(outside, -torch.inf)


def _argmax(ids: Tensor, logits: Tensor) -> None:
    ids.copy_(logits.argmax(-1))


def _sample(ids: Tensor, logits: Tensor, uniform: Tensor) -> None:
    x = _without_nan(logits)
    below = x - x.amax(-1, keepdim=True)
    shares = torch.where(below > NEGLIGIBLE, below.double().exp(), 0.0)
    sums = shares.cumsum(-1)
    hit = (sums > uniform.unsqueeze(1) * sums[:, -1:]) & (shares > 0)
    last = x.size(1) - 1 - (shares > 0).flip(1).int().argmax(-1)
    found = torch.where(hit.any(-1), hit.int().argmax(-1), last)
    ids.copy_(torch.where(sums[:, -1] > 0, found, x.argmax(-1)))


_SHAPES = ((1, 1), (0, 50), (3, 17), (2, 1000), (5, 4099), (16, 300), (1, 40000))


def _logits(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return 3 * torch.randn(shape, generator=generator)


def _strided(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return _logits((rows, vocab + 24), generator)[:, 3 : 3 + vocab]


def _peculiar(vocab: int, generator: torch.Generator) -> Tensor:
    """Rows of `vocab` ≥ 16 that are unlike a model's: masked, constant, of few values, of extreme range."""
    inf = torch.inf
    masked = _logits((4, vocab), generator)
    masked[0].fill_(-inf)
    masked[1, : vocab - 3] = -inf
    masked[2, 1::2] = -inf
    masked[3, vocab // 2 :] = torch.finfo(torch.float32).min
    constant = torch.full((2, vocab), 1.5)
    constant[1, :8] = 2.0
    few = torch.randint(3, (2, vocab), generator=generator).float()
    extreme = _logits((3, vocab), generator)
    extreme[0] *= 1e30
    extreme[1] *= 1e-42
    extreme[2, 7] = inf
    return torch.cat((masked, constant, few, extreme))


def _k_and_p(rows: int, vocab: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    k = torch.randint(1, vocab + 1, (rows,), generator=generator)
    small = torch.randint(1, min(vocab, 50) + 1, (rows,), generator=generator, dtype=torch.int32)
    p = torch.rand(rows, generator=generator)
    k[::3], p[::4], small[1::4] = vocab, 1.0, vocab
    for name, top_k in (("off", None), ("any", k), ("small", small), ("one", torch.ones_like(k))):
        for value, top_p in (("off", None), ("any", p), ("tiny", 1e-9 * p), ("large", 1 - 0.05 * p)):
            yield f"k {name}, p {value}", top_k, top_p


def _top_k_top_p_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    inputs = [(str(shape), _logits(shape, generator)) for shape in _SHAPES]
    inputs += [("strided", _strided(6, 700, generator))]
    for name, logits in inputs:
        for setting, top_k, top_p in _k_and_p(logits.size(0), logits.size(1), generator):
            yield Case(f"{name} {setting}", dtype, {"logits": logits, "top_k": top_k, "top_p": top_p})
    for vocab in (16, 4096):
        logits = _peculiar(vocab, generator)
        for value in (1, 5, 8, vocab):
            k = torch.full((logits.size(0),), value)
            # Multiples of 1/16, which make sums of equal probabilities exact.
            for mass in (0.0625, 0.5, 0.9375, 1.0):
                p = torch.full((logits.size(0),), mass)
                yield Case(f"peculiar {vocab} k {value} p {mass}", dtype, {"logits": logits, "top_k": k, "top_p": p})


def _temperature_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for logits in (*(_logits(shape, generator) for shape in _SHAPES), _strided(6, 700, generator)):
        temperature = 2 * torch.rand(logits.size(0), generator=generator)
        temperature[1::4], temperature[2::4] = 0.0, 1.0
        yield Case(f"{tuple(logits.shape)}", dtype, {"logits": logits, "temperature": temperature})


def _min_p_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for logits in (*(_logits(shape, generator) for shape in _SHAPES), _strided(6, 700, generator)):
        min_p = torch.rand(logits.size(0), generator=generator)
        min_p[1::3] = 0.0
        yield Case(f"{tuple(logits.shape)}", dtype, {"logits": logits, "min_p": min_p})
    for value in (0.0, 0.25, 1.0):
        logits = _peculiar(2050, generator)
        yield Case(f"peculiar {value}", dtype, {"logits": logits, "min_p": torch.full((logits.size(0),), value)})


def _ids(logits: Tensor) -> Tensor:
    return torch.full((logits.size(0),), -1)


def _argmax_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for logits in (*(_logits(shape, generator) for shape in _SHAPES), _strided(6, 700, generator)):
        yield Case(f"{tuple(logits.shape)}", dtype, {"ids": _ids(logits), "logits": logits.to(dtype)})
    peculiar = _peculiar(5000, generator)
    yield Case("peculiar", dtype, {"ids": _ids(peculiar), "logits": peculiar.to(dtype)})


def _sample_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    rows = [*(_logits(shape, generator) for shape in _SHAPES), _strided(6, 700, generator), _peculiar(2050, generator)]
    masked = _logits((40, 5000), generator)
    masked[_logits((40, 5000), generator) < 9] = -torch.inf
    for logits in (*rows, masked):
        uniform = torch.rand(logits.size(0), generator=generator, dtype=torch.float64)
        for name, u in (("any", uniform), ("zero", 0 * uniform), ("near one", 1 - 2**-53 + 0 * uniform)):
            yield Case(f"{tuple(logits.shape)} {name}", dtype, {"ids": _ids(logits), "logits": logits, "uniform": u})


_FLOAT32 = (torch.float32,)

TOP_K_TOP_P = define(
    Op(
        name="top_k_top_p",
        schema="(Tensor(a!) logits, Tensor? top_k, Tensor? top_p) -> ()",
        reference=_top_k_top_p,
        cases=_top_k_top_p_cases,
        dtypes=_FLOAT32,
        exact=frozenset({"logits"}),
    )
)
"""Sets logits outside the top-k and the nucleus of each row to -infinity, in place.

``top_k``: int32 or int64 [B]; elements below the k-th greatest are outside, so all that equal it stay; below 1 or at
least V: off. ``top_p``: float32 [B], on the softmax of what top-k leaves: from the greatest down, elements stay until
their probabilities sum up to p, at least one; where equal elements straddle that sum, those of the highest index stay
(the order of a stable ascending sort); at least 1: off. The sums have a relative error of 1e-6: an element within that
of p may fall on either side. NaN counts as -infinity; a row with both off stays as it is.
"""

TEMPERATURE = define(
    Op(
        name="temperature",
        schema="(Tensor(a!) logits, Tensor temperature) -> ()",
        reference=_temperature,
        cases=_temperature_cases,
        dtypes=_FLOAT32,
        exact=frozenset({"logits"}),
    )
)
"""Divides each row by its temperature, in place. ``temperature``: float32 [B]; rows below 1e-5 are chosen greedily and
stay as they are."""

MIN_P = define(
    Op(
        name="min_p",
        schema="(Tensor(a!) logits, Tensor min_p) -> ()",
        reference=_min_p,
        cases=_min_p_cases,
        dtypes=_FLOAT32,
        exact=frozenset({"logits"}),
    )
)
"""Sets logits below max + log(min_p) to -infinity, in place: tokens less probable than min_p times the most probable
one (Nguyen et al., 2024). ``min_p``: float32 [B]; 0: off. The greatest stays always; NaN counts as -infinity."""

ARGMAX = define(
    Op(
        name="argmax",
        schema="(Tensor(a!) ids, Tensor logits) -> ()",
        reference=_argmax,
        cases=_argmax_cases,
        exact=frozenset({"ids"}),
    )
)
"""ids[b] = the first index of the greatest element of row b, or of its first NaN if it has one. ``ids``: int64 [B]."""

SAMPLE = define(
    Op(
        name="sample",
        schema="(Tensor(a!) ids, Tensor logits, Tensor uniform) -> ()",
        reference=_sample,
        cases=_sample_cases,
        dtypes=_FLOAT32,
        exact=frozenset({"ids"}),
    )
)
"""Draws from softmax(logits) by inversion: ids[b] = the least i with p[0] + … + p[i] > uniform[b].

``ids``: int64 [B]; ``uniform``: float64 [B] in [0, 1), anything else is an error. Exponentials are float32 with a
relative error below 1e-6, their sums over blocks are float64, so the probability with which a token is drawn is that of
the softmax to a relative 1e-6. A token of probability zero (more than 87 below the maximum, or NaN) is never drawn; a
row that has no finite maximum gives its argmax.
"""
