"""Filters and choices of the sampler, in torch: the vendor's callables filter and draw in one, with noise of their own.

The hardware has no float64, so sums are float32 here. No exponential noise: torch's has no kernel on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.vendor import Implementation, Vendor
from vllm_kunlun.ops.sampling import MIN_P, NEGLIGIBLE, TEMPERATURE


def temperature(vendor: Vendor) -> Implementation:
    """The op `temperature`."""
    return TEMPERATURE.reference


def min_p(vendor: Vendor) -> Implementation:
    """The op `min_p`."""
    return MIN_P.reference


def argmax(vendor: Vendor) -> Implementation:
    """The op `argmax`."""

    def run(ids: Tensor, logits: Tensor) -> None:
        torch.argmax(logits, dim=-1, out=ids)

    return run


def _without_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), -torch.inf)


def top_k_top_p(vendor: Vendor) -> Implementation:
    """The op `top_k_top_p`, by a sort."""

    def run(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
        vocab = logits.size(1)
        finite = _without_nan(logits).clamp_max(torch.finfo(torch.float32).max)
        values, order = finite.sort(dim=-1, stable=True)
        active = torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
        if top_k is not None:
            active |= (top_k >= 1) & (top_k < vocab)
            values = values.masked_fill(values < _k_threshold(values, top_k), -torch.inf)
        if top_p is not None:
            active |= top_p < 1
            values = values.masked_fill(_outside_nucleus(values, top_p), -torch.inf)
        outside = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, values == -torch.inf)
        logits.masked_fill_(outside & active.unsqueeze(1), -torch.inf)

    return run


def _k_threshold(ascending: Tensor, top_k: Tensor) -> Tensor:
    """The k-th greatest of each row, [B, 1]; of a k that is off, the least."""
    vocab = ascending.size(1)
    k = top_k.long().where((top_k >= 1) & (top_k <= vocab), vocab)
    return ascending.gather(1, (vocab - k).unsqueeze(1))


def _outside_nucleus(ascending: Tensor, top_p: Tensor) -> Tensor:
    """What lies below the nucleus: elements up to which the probabilities do not exceed 1 - p."""
    p = top_p.unsqueeze(1)
    outside = (ascending.softmax(-1).cumsum(-1) <= 1 - p) & (p < 1)
    outside[:, -1] = False
    return outside


def sample(vendor: Vendor) -> Implementation:
    """The op `sample`. `uniform` may be float32, which spares the device a conversion it may do on the host."""

    def run(ids: Tensor, logits: Tensor, uniform: Tensor) -> None:
        x = _without_nan(logits)
        below = x - x.amax(-1, keepdim=True)
        shares = torch.where(below > NEGLIGIBLE, below.exp(), 0.0)
        sums = shares.cumsum(-1)
        hit = (sums > uniform.float().unsqueeze(1) * sums[:, -1:]) & (shares > 0)
        last = x.size(1) - 1 - (shares > 0).flip(1).int().argmax(-1)
        found = torch.where(hit.any(-1), hit.int().argmax(-1), last)
        ids.copy_(torch.where(sums[:, -1] > 0, found, x.argmax(-1)))

    return run
