"""Embedding masks, raw copies and references to memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.vendor import emulates


@emulates("xspeedgate_ops.get_masked_input_and_mask")
def get_masked_input_and_mask(call: Call) -> Mapping[str, Result]:
    """Ids within this rank's shard: original vocabulary first, then its padding, then added tokens."""
    ids = call["input"]
    original = (ids >= call["org_start"]) & (ids < call["org_end"])
    added = (ids >= call["added_start"]) & (ids < call["added_end"])
    shard = call["org_end"] - call["org_start"] + call["num_org_pad"]
    local = torch.where(original, ids - call["org_start"], torch.where(added, ids - call["added_start"] + shard, 0))
    return {"masked": local, "mask": ~(original | added)}


@emulates("xspeedgate_ops.weak_ref_tensor")
def weak_ref_tensor(call: Call) -> Mapping[str, Result]:
    """The same memory, without a claim on it."""
    return {"alias": _unowned(call["tensor"])}


def _unowned(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    size = (sum((count - 1) * stride for count, stride in strides) + 1) * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


@emulates("xspeedgate_ops.batch_memcpy")
def batch_memcpy(call: Call) -> Mapping[str, Result]:
    """Copies of bytes between addresses."""
    copies = list(zip(*(call[name].tolist() for name in ("src_ptrs", "dst_ptrs", "sizes")), strict=True))
    for source, target, size in copies:
        if size < 0 or (size and not (source and target)):
            call.refuse(f"a copy of {size} bytes from address {source} to {target}")
        if size and source < target + size and target < source + size:
            call.refuse(f"the {size} bytes at {source} and at {target} overlap")
    for source, target, size in copies:
        ctypes.memmove(target, source, size)
    return {}
