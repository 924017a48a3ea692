"""How a batch is split between the kernels for decode and for prefill, from its host copies alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.vendor import Refused, fault

Integers = np.ndarray[tuple[int], np.dtype[np.int32]]


def host_numbers(op: str, name: str, copy: Tensor | None) -> Integers:
    """The numbers of a host copy; raises Refused without it, for reading the device's would make the host wait."""
    if copy is None:
        raise Refused(op, f"{name} is missing; the vendor's kernels take the lengths from the host and from the device")
    if copy.device.type != "cpu" or copy.dtype != torch.int32:
        raise Refused(op, f"{name} must be int32 in host memory, not {copy.dtype} on {copy.device}")
    numbers: Integers = copy.numpy()
    return numbers


def leading_decodes(starts: Integers) -> int:
    """How many requests at the front have one query each."""
    others = np.flatnonzero(np.diff(starts) != 1)
    return int(others[0]) if others.size else len(starts) - 1


def largest_decode_batch() -> int:
    """The most requests that one call of the decode kernel may have."""
    return fault("decode-batch-limit").parameters["batch"] - 1


def decode_parts(requests: int) -> Iterator[slice]:
    """Ranges of requests of about the same number, none above the kernel's limit."""
    if requests:
        share = -(-requests // -(-requests // largest_decode_batch()))
        yield from (slice(first, min(first + share, requests)) for first in range(0, requests, share))


@dataclass(frozen=True)
class Offsets:
    """Offsets from 0 of the requests of a part of the batch, int32 [n + 1], in both places; `total` is the last."""

    host: Tensor
    device: Tensor
    total: int


def _offsets(host: Integers, device: Tensor) -> Offsets:
    return Offsets(torch.from_numpy(host), device, int(host[-1]))


def offsets_from(first: int, starts: Integers, start_loc: Tensor) -> Offsets:
    """Offsets of the requests from `first` on; those before it have a query each."""
    if first == 0:
        return _offsets(starts, start_loc[: len(starts)])
    return _offsets(starts[first:] - np.int32(first), start_loc[first : len(starts)] - first)


def offsets_of(lengths: Integers, device_lengths: Tensor) -> Offsets:
    """Offsets of packed rows from the number of rows of each request."""
    host = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=host[1:])
    device = device_lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(device_lengths[: len(lengths)], 0, dtype=torch.int32, out=device[1:])
    return _offsets(host, device)


def zero_keyless(out: Tensor, lengths: Integers, seq_lens: Tensor) -> None:
    """Zeroes the rows of decodes without keys, [n, H, D], which the kernel leaves as they are."""
    if not lengths.all():
        out.masked_fill_((seq_lens[: len(lengths)] == 0).view(-1, 1, 1), 0)


def check_causal(op: str, causal: bool, starts: Integers, lengths: Integers) -> None:
    """Raises Refused where a causal request has more queries than keys, the first of which would see none."""
    if causal and bool((np.diff(starts) > lengths).any()):
        raise Refused(op, "a request has more queries than keys, and the vendor's kernel expects a key for each query")
