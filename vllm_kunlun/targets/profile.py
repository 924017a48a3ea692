"""The capability record of a target."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Profile:
    """``target`` is the word of VLLM_KUNLUN_TARGET, ``name`` what users are shown.

    ``torch_device`` and ``dispatch_key`` are torch's words, ``dist_backend`` is torch.distributed's. ``dtypes`` are the
    model and KV cache types, preferred first; ``default_block_size`` is in tokens, ``default_memory_utilization`` a
    fraction of the usable memory.
    """

    target: str
    name: str
    torch_device: str
    dispatch_key: str
    dist_backend: str
    dtypes: tuple[torch.dtype, ...]
    head_sizes: Container[int]
    default_block_size: int
    default_memory_utilization: float
