"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_kunlun.emulator.call import Call, Result
from vllm_kunlun.emulator.numerics.norm import rms
from vllm_kunlun.emulator.vendor import emulates


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotates the first dimensions of float32 heads [T, H, D]; cos and sin are [T, R/2]."""
    half = cos.shape[-1]
    turned, kept = heads[..., : 2 * half], heads[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(rotated, -1) if is_neox else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((joined, kept), -1)


def table(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin rows of each position in float32, [..., R/2]."""
    cos, sin = cache[positions.long()].float().chunk(2, -1)
    return cos, sin


def _in_place(tensor: Tensor, head_size: int, cos: Tensor, sin: Tensor, is_neox: bool) -> None:
    heads = tensor.float().unflatten(-1, (-1, head_size))
    tensor.copy_(rotate(heads, cos, sin, is_neox).flatten(-2))


@emulates("kunlun_ops.rotary_embedding")
def rotary_embedding(call: Call) -> Mapping[str, Result]:
    """Rotation in place."""
    cos, sin = table(call["cos_sin_cache"], call["positions"])
    for name in ("query", "key"):
        _in_place(call[name], call["head_size"], cos, sin, call["is_neox"])
    return {}


@emulates("kunlun_ops.rotary_embedding_gptj")
def rotary_embedding_gptj(call: Call) -> Mapping[str, Result]:
    """Rotation of interleaved pairs in place."""
    cos, sin = table(call["cos_sin_cache"], call["positions"])
    for name in ("query", "key"):
        _in_place(call[name], call["head_size"], cos, sin, False)
    return {}


@emulates("xspeedgate_ops.flashinfer_rotary_embedding")
def flashinfer_rotary_embedding(call: Call) -> Mapping[str, Result]:
    """Rotation of the first rotary_dim dimensions of each head, into new tensors."""
    cos, sin = table(call["cos_sin_cache"], call["positions"])
    return {f"{name}_out": _rotated(call, name, cos, sin, call["is_neox_style"]) for name in ("query", "key")}


def _rotated(call: Call, name: str, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    tensor = call.float32(name)
    heads = tensor if tensor.dim() == 3 else tensor.unflatten(-1, (-1, call["head_size"]))
    return rotate(heads, cos, sin, is_neox).reshape(tensor.shape)


@emulates("xspeedgate_ops.mrotary_embedding_fwd_v0")
def mrotary_embedding_fwd_v0(call: Call) -> Mapping[str, Result]:
    """Rotation with a position each for time, height and width; sections say which frequencies follow which."""
    cos, sin = table(call["cos_sin_cache"], call["positions"])
    sections = (call["section0"], call["section1"], call["section2"])
    axis = _axes(sections, call["mrope_interleaved"], cos.shape[-1]).expand(1, cos.shape[1], -1)
    cos, sin = cos.gather(0, axis)[0], sin.gather(0, axis)[0]
    return {f"{name}_out": _rotated(call, name, cos, sin, call["is_neox_style"]) for name in ("query", "key")}


def _axes(sections: Sequence[int], interleaved: bool, frequencies: int) -> Tensor:
    """Which of the three position rows each frequency follows, [R/2]."""
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axis = torch.zeros(frequencies, dtype=torch.long)
    for row in (1, 2):
        axis[row : 3 * sections[row] : 3] = row
    return axis


@emulates("kunlun_ops.split_norm_rope_neox")
def split_norm_rope_neox(call: Call) -> Mapping[str, Result]:
    """Split, norm of the heads of query and key, rotation."""
    sizes = [call[name] * call["head_dim"] for name in ("head_num", "kv_head_num", "kv_head_num")]
    query, key, value = call.float32("qkv").split(sizes, -1)
    cos, sin = table(call["rotary_pos_embedding"], call["positions"])
    return {
        "q_emb": _normed_and_rotated(call, query, call.float32("q_norm_weight"), cos, sin),
        "k_emb": _normed_and_rotated(call, key, call.float32("k_norm_weight"), cos, sin),
        "v_out": value,
    }


def _normed_and_rotated(call: Call, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = rms(x.unflatten(-1, (-1, weight.shape[0])), call.op.fixed["epsilon"]) * weight
    return rotate(heads, cos, sin, True).flatten(-2)


@emulates("xspeedgate_ops.split_norm_rope_neox")
def split_norm_rope_neox_gated(call: Call) -> Mapping[str, Result]:
    """The same into new tensors, where each query head may be followed by its gate."""
    q_size, kv_size, gated = call["q_size"], call["kv_size"], call["attn_output_gate"]
    query, key, value = call.float32("qkv").split([2 * q_size if gated else q_size, kv_size, kv_size], -1)
    gate = query[:, :0]
    if gated:
        halves = query.unflatten(-1, (-1, 2, call["head_dim"]))
        query, gate = halves[:, :, 0].flatten(-2), halves[:, :, 1].flatten(-2)
    offset = 0.0 if call.fault("split-norm-rope-plain-weight") else 1.0
    cos, sin = table(call["cos_sin_cache"], call["positions"])
    return {
        "query": _normed_and_rotated(call, query, call.float32("q_weights") + offset, cos, sin),
        "key": _normed_and_rotated(call, key, call.float32("k_weights") + offset, cos, sin),
        "value": value,
        "gate": gate,
    }
