"""Writes a GGUF file as a Hugging Face checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_kunlun.tools.demo_model.safetensors_writer import write_safetensors
from vllm_kunlun.tools.demo_model.source import DemoModelError
from vllm_kunlun.tools.demo_model.tokenizer import tokenizer_config, tokenizer_json
from vllm_kunlun.tools.demo_model.weights import HeadCounts, converted, plan_tensors

WEIGHTS_FILE = "model.safetensors"
Progress = Callable[[int, int], None]
"""Called with (bytes done since the last call, bytes in total)."""


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build `config.json` of a Llama model with tied embeddings from GGUF fields."""
    # GGUF stores the epsilon in float32; six digits give back the decimal that was meant.
    epsilon = float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **_token_ids(fields),
    }


def _token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def write_checkpoint(gguf_path: Path, directory: Path, progress: Progress) -> None:
    """Write configuration, tokenizer and weights of `gguf_path` into the existing `directory`.

    Raises DemoModelError when the gguf package is missing or the file is not a Llama model.
    """
    reader = _open_gguf(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise DemoModelError(f"{gguf_path} is not a Llama model")
    _write_json(directory / "config.json", model_config(fields))
    _write_json(directory / "generation_config.json", _token_ids(fields))
    _write_json(directory / "tokenizer.json", tokenizer_json(fields))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(fields))
    plans = plan_tensors(reader.tensors)
    total = sum(plan.num_bytes for plan in plans)
    heads = HeadCounts(fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    write_safetensors(
        directory / WEIGHTS_FILE, plans, converted(plans, heads), lambda num_bytes: progress(num_bytes, total)
    )


def _open_gguf(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise DemoModelError("the package gguf is not installed. Install it with: pip install gguf") from error
    try:
        return gguf.GGUFReader(path)
    except ValueError as error:
        raise DemoModelError(f"{path} is not a readable GGUF file: {error}") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
