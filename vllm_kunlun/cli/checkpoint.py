"""What a checkpoint's config.json says about its weights, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_kunlun.cli.screen import CommandError


def read_config(model: str) -> dict[str, Any]:
    """Return the content of config.json in the folder `model`; empty when there is no such folder or file.

    Raises CommandError when the file is not a JSON object.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CommandError(f"{path} does not hold a JSON object")
    return content


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype the weights are stored in ("bfloat16", …), from the text model of a multimodal one too."""
    text = config.get("text_config")
    found = config.get("dtype") or config.get("torch_dtype")
    if found is None and isinstance(text, dict):
        return stored_dtype(text)
    return str(found).removeprefix("torch.") if found is not None else None


def has_fp8_weights(config: Mapping[str, Any]) -> bool:
    """Tell whether the quantization of a checkpoint stores weights as 8-bit floating-point numbers."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return False
    methods = (quantization.get("quant_method"), quantization.get("quant_algo"))
    return any("fp8" in str(method).lower() for method in methods) or any(
        weights.get("type") == "float" and weights.get("num_bits") == 8 for weights in _weight_schemes(quantization)
    )


def _weight_schemes(quantization: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the weights' scheme of each group (the layout of compressed-tensors)."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights
