"""What the P800 is and can do, as data; and the same card played by the emulator on CPU tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.questions import PREFILL
from vllm_kunlun.targets.profile import Profile

_LARGEST_HEAD = 1024


def _head_sizes() -> frozenset[int]:
    """Head sizes that no limit of the attention kernel excludes."""
    limits = [limit.require for limit in load().op(PREFILL).limits if limit.require.names == {"D"}]
    sizes = range(1, _LARGEST_HEAD + 1)
    return frozenset(size for size in sizes if all(require.value({"D": size}) for require in limits))


P800 = Profile(
    target="p800",
    name="Kunlun P800",
    torch_device="cuda",
    dispatch_key="CUDA",
    dist_backend="nccl",
    # Every public command line for the card asks for float16.
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_sizes=_head_sizes(),
    default_block_size=128,
    default_memory_utilization=0.9,
)

EMULATED = replace(
    P800,
    target="emulated",
    name="Kunlun P800, emulated on the CPU",
    torch_device="cpu",
    dispatch_key="CPU",
    dist_backend="gloo",
)
