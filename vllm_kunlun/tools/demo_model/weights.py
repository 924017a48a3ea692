"""Weights of a Llama GGUF file as Hugging Face tensors in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_kunlun.tools.demo_model.source import DemoModelError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True)
class HeadCounts:
    """Attention heads of the model: `query` and `key_value`."""

    query: int
    key_value: int


def huggingface_name(gguf_name: str) -> str:
    """Map a GGUF tensor name to the name transformers' Llama uses; raises DemoModelError for others."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_PATTERN.fullmatch(gguf_name)
    if match is None or match.group(2) not in _LAYER_NAMES:
        raise DemoModelError(f"the GGUF file holds a tensor that a Llama model does not have: {gguf_name}")
    return f"model.layers.{match.group(1)}.{_LAYER_NAMES[match.group(2)]}.weight"


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order GGUF gives rotary projections.

    `weight`: [num_heads * head_size, hidden]. GGUF keeps each head's rows as interleaved rotary pairs (row 2i and
    2i+1 turn together); transformers keeps the first half of all pairs before the second half (row i and
    i + head_size / 2).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 values to the nearest bfloat16 (ties to even); returns the bit patterns.

    Raises DemoModelError for infinities and NaN, which no checkpoint holds.
    """
    if not np.isfinite(values).all():
        raise DemoModelError("the GGUF file holds values that are not finite; it is damaged")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest_even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + nearest_even) >> np.uint32(16)).astype(np.uint16)


def convert_tensor(tensor: Any, heads: HeadCounts) -> npt.NDArray[np.uint16]:
    """Return one GGUF tensor (`gguf.ReaderTensor`) dequantized, in Hugging Face's row order, as bfloat16 bits."""
    import gguf

    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if tensor.name.endswith("attn_q.weight"):
        values = unpermute(values, heads.query)
    elif tensor.name.endswith("attn_k.weight"):
        values = unpermute(values, heads.key_value)
    return round_to_bfloat16(values)


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the checkpoint before it is converted: its GGUF source, its name and its shape."""

    source: Any
    name: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bfloat16."""
        return 2 * int(np.prod(self.shape))


def plan_tensors(tensors: list[Any]) -> list[TensorPlan]:
    """Name and shape every tensor of a GGUF file, sorted by name. GGUF lists dimensions innermost first."""
    plans = [
        TensorPlan(tensor, huggingface_name(tensor.name), tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in tensors
    ]
    return sorted(plans, key=lambda plan: plan.name)


def converted(plans: list[TensorPlan], heads: HeadCounts) -> Iterator[tuple[TensorPlan, npt.NDArray[np.uint16]]]:
    """Convert the planned tensors one at a time, so that only one is held in float32."""
    for plan in plans:
        bits = convert_tensor(plan.source, heads)
        if bits.shape != plan.shape:
            raise DemoModelError(f"{plan.source.name} has the shape {bits.shape}, expected {plan.shape}")
        yield plan, bits
