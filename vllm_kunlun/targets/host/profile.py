"""What the host target is and can do, as data."""

from __future__ import annotations

import torch

from vllm_kunlun.targets.profile import Profile

HOST = Profile(
    target="host",
    name="Kunlun host (x86 CPU)",
    torch_device="cpu",
    dispatch_key="CPU",
    dist_backend="gloo",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_sizes=range(1, 513),
    default_block_size=32,
    default_memory_utilization=0.5,
)
