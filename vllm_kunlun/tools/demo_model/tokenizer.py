"""Tokenizer files of a Hugging Face checkpoint from a GGUF file's tokenizer metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_kunlun.tools.demo_model.source import DemoModelError

CONTROL_TOKEN = 3  # GGUF token type of special tokens


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build `tokenizer.json` (byte-level BPE) from GGUF fields.

    GGUF names the pre-tokenizer "smollm": digits are split one by one, then GPT-2's pattern splits the rest.
    Raises DemoModelError for another tokenizer model.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(f"the GGUF file has the tokenizer {kind[0]}/{kind[1]}, expected gpt2/smollm")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **_special_token(tokens[index])} for index in special_token_ids(fields)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": _bpe_model(tokens, fields["tokenizer.ggml.merges"]),
    }


def _bpe_model(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }


def special_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """List the ids of special tokens, ascending."""
    types: list[int] = fields["tokenizer.ggml.token_type"]
    return [index for index, kind in enumerate(types) if kind == CONTROL_TOKEN]


def _special_token(content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **flags}


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build `tokenizer_config.json`: special tokens, length limit and chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def token(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"]]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "added_tokens_decoder": {str(index): _special_token(tokens[index]) for index in special_token_ids(fields)},
        "chat_template": fields["tokenizer.chat_template"],
    }
