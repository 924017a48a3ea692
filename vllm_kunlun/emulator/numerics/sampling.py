"""Sampling and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


def _per_row(call: Call, name: str) -> Tensor:
    value = call[name]
    rows = call["probs"].shape[0]
    return value.reshape(-1, 1) if isinstance(value, Tensor) else torch.full((rows, 1), value)


def keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """Zeroes what is less probable than the k-th token of its row; top_k [B, 1], 0 or less keeps all."""
    vocabulary = probs.shape[-1]
    k = torch.where(top_k > 0, top_k.clamp_max(vocabulary), vocabulary)
    least = probs.sort(-1, descending=True).values.gather(-1, k.long() - 1)
    return probs.masked_fill(probs < least, 0.0)


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes the tokens past the most probable ones that together reach top_p [B, 1] of a row's sum."""
    ordered, order = (probs / probs.sum(-1, keepdim=True)).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    dropped = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before >= top_p)
    # The most probable token stays whatever top_p is.
    return probs.masked_fill(dropped.scatter(-1, order[:, :1], False), 0.0)


def _draw(probs: Tensor) -> Tensor:
    if not probs.shape[0]:
        return torch.empty(0, dtype=torch.int64)
    return torch.multinomial(probs, 1).flatten()


@emulates("kunlun_ops.top_k_sampling_from_probs")
def top_k_sampling_from_probs(call: Call) -> Mapping[str, Result]:
    """A draw from the top_k tokens of each row."""
    return {"ids": _draw(keep_top_k(call["probs"], _per_row(call, "top_k")))}


@emulates("kunlun_ops.top_p_sampling_from_probs")
def top_p_sampling_from_probs(call: Call) -> Mapping[str, Result]:
    """A draw from the top_p nucleus of each row."""
    return {"ids": _draw(keep_top_p(call["probs"], _per_row(call, "top_p")))}


@emulates("kunlun_ops.top_k_top_p_sampling_from_probs")
def top_k_top_p_sampling_from_probs(call: Call) -> Mapping[str, Result]:
    """A draw from the top_p nucleus of the top_k tokens of each row."""
    kept = keep_top_k(call["probs"], _per_row(call, "top_k"))
    return {"ids": _draw(keep_top_p(kept, _per_row(call, "top_p")))}


@emulates("xspeedgate_ops.inplace_exponential")
def inplace_exponential(call: Call) -> Mapping[str, Result]:
    """Exponential noise of rate 1."""
    return {"q": torch.empty(call["q"].shape).exponential_(generator=call["generator"])}


@emulates("xspeedgate_ops.compute_token_logprobs")
def compute_token_logprobs(call: Call) -> Mapping[str, Result]:
    """log-softmax at the given ids."""
    return {"logprobs": torch.log_softmax(call["logits"], -1).gather(-1, call["token_ids"])}
