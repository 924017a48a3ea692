"""A checkpoint as a GGUF file in bfloat16, so that llama.cpp computes with the same weights.

The file holds no vocabulary: prompts and answers of a measurement are token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kunlun.tools.bench.client import BenchError

if TYPE_CHECKING:
    import numpy as np

ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3"}
"""GGUF's architecture for each `model_type` that can be converted."""


def ensure_gguf(checkpoint: Path, folder: Path) -> Path:
    """Return the GGUF of a checkpoint, written when it is missing or older than the weights.

    Raises:
        BenchError: the structure cannot be converted, or the package gguf is missing.
    """
    target = folder / f"{checkpoint.name}-bf16.gguf"
    newest = max((file.stat().st_mtime for file in checkpoint.glob("*.safetensors")), default=0.0)
    if not target.exists() or target.stat().st_mtime < newest:
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        write_gguf(checkpoint, partial)
        partial.rename(target)
    return target


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Write matrices in bfloat16 and vectors in float32.

    Raises:
        BenchError: the structure cannot be converted, or the package gguf is missing.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise BenchError("llama.cpp reads GGUF files, and writing one needs: pip install gguf") from error
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BenchError(f"{checkpoint.name} is a {config['model_type']} model; GGUF files are written of {known}.")
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config["model_type"]])
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _add_parameters(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, array in read_tensors(checkpoint):
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight",)), arranged(name, array, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_parameters(writer: Any, config: Mapping[str, Any]) -> None:
    """Write the structure's numbers."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a checkpoint's safetensors files in float32."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- not a mapping
                yield name, tensors.get_tensor(name).float().numpy()


def arranged(name: str, array: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Reorder Llama's query and key rows: GGUF rotates neighbours, the checkpoint's rotation pairs the two halves."""
    if config["model_type"] != "llama":
        return array
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for projection, key in heads.items():
        if name.endswith(f"{projection}.weight"):
            halves = array.reshape(config[key], 2, -1, array.shape[-1])
            return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _add_tensor(writer: Any, name: str, array: np.ndarray) -> None:
    import gguf

    if array.ndim == 1:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
