"""Streams bfloat16 tensors into a safetensors file without holding them all in memory.

Format: 8 bytes little-endian header length, a JSON header padded with blanks to a multiple of 8 bytes, the data
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_kunlun.tools.demo_model.weights import TensorPlan


def header_bytes(plans: Iterable[TensorPlan]) -> bytes:
    """Return length and header for tensors that follow in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        end = offset + plan.num_bytes
        header[plan.name] = {"dtype": "BF16", "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path,
    plans: list[TensorPlan],
    tensors: Iterable[tuple[TensorPlan, npt.NDArray[np.uint16]]],
    advance: Callable[[int], None],
) -> None:
    """Write `tensors` (bfloat16 bits, in the order of `plans`); `advance` is told the bytes of each one."""
    with path.open("wb") as file:
        file.write(header_bytes(plans))
        for plan, bits in tensors:
            file.write(bits.astype("<u2", copy=False).tobytes())
            advance(plan.num_bytes)
