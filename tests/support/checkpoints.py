"""Tiny checkpoints with random weights, one for each structure that models differ in.

Weights are drawn wider than models are initialized with, so that attention, norms and gates all have a say in the
greedy token: with the usual 0.02 nearly every structure computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

SPREAD = 0.08
SCALED_EMBEDDING_SPREAD = 0.02
"""Gemma multiplies embeddings and ties them to the output: drawn wider, every token would predict itself."""
SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{**SMALL, "head_dim": 32, **changes})


def _gemma2() -> PretrainedConfig:
    """Interleaved sliding window, both soft caps, norms of 1 + weight, four norms a layer, its own attention scale."""
    return Gemma2Config(
        **SMALL,
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
    )


def _gemma3() -> PretrainedConfig:
    """Interleaved sliding window with a rotary base of its own, and qk-norm."""
    return Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    )


def _mistral() -> PretrainedConfig:
    return MistralConfig(**SMALL, head_dim=32, sliding_window=16)


def _glm() -> PretrainedConfig:
    """Partial rotary embedding in interleaved pairs, qkv bias."""
    return GlmConfig(**SMALL, head_dim=32, partial_rotary_factor=0.5, attention_bias=True)


def _phi() -> PretrainedConfig:
    """Partial rotary embedding in halves, LayerNorm, GELU, no gate, parallel attention and feed-forward."""
    return PhiConfig(**{**SMALL, "num_key_value_heads": 4, "intermediate_size": 512}, partial_rotary_factor=0.5)


def _bloom() -> PretrainedConfig:
    """ALiBi instead of positions, LayerNorm also after the embedding, tied weights."""
    sizes = {"vocab_size": SMALL["vocab_size"], "hidden_size": SMALL["hidden_size"], "n_layer": 2, "n_head": 4}
    return BloomConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)


STRUCTURES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llama-gqa": _llama,
    "llama-mqa": lambda: _llama(num_key_value_heads=1),
    "llama-mha-untied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=False),
    "llama-head-80": lambda: _llama(head_dim=80),
    "llama-head-96": lambda: _llama(head_dim=96),
    "llama-head-112": lambda: _llama(head_dim=112),
    "llama-head-256": lambda: _llama(head_dim=256),
    "llama3-scaled-rope": lambda: _llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    ),
    "qwen2-qkv-bias": lambda: Qwen2Config(**SMALL),
    "qwen3-qk-norm": lambda: Qwen3Config(**SMALL, head_dim=64),
    "mistral-sliding-window": _mistral,
    "gemma2-softcap": _gemma2,
    "gemma3-qk-norm-window": _gemma3,
    "bloom-alibi": _bloom,
    "glm-partial-rotary": _glm,
    "phi-partial-rotary": _phi,
}


def _spread_weights(model: torch.nn.Module, embedding_spread: float) -> None:
    """Draw matrices wide, and move every norm's weight and every bias off its neutral value."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(0.0, embedding_spread)
        elif weight.dim() > 1:
            weight.normal_(0.0, SPREAD)
        elif "norm" in name and name.endswith("weight"):
            weight.add_(torch.randn_like(weight) * 0.1)
        else:
            weight.normal_(0.0, 0.1)


@torch.no_grad()
def save_checkpoint(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a float32 checkpoint of `config` with seeded random weights; the same content for the same seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    is_scaled = config.model_type.startswith("gemma")
    _spread_weights(model, SCALED_EMBEDDING_SPREAD if is_scaled else SPREAD)
    model.save_pretrained(folder)
    return folder


def structure_checkpoint(name: str, folder: Path) -> Path:
    return save_checkpoint(STRUCTURES[name](), folder / name)


@torch.no_grad()
def sharp_checkpoint(folder: Path) -> Path:
    """A tiny Llama whose logits spread as a trained model's do, so that its distributions are far from even."""
    structure_checkpoint("llama-gqa", folder)
    checkpoint = folder / "llama-gqa"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.model.norm.weight *= 3.0
    model.save_pretrained(checkpoint)
    return checkpoint
