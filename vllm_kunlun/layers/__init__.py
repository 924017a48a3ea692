"""vLLM's layers with the op contract under them. No numerics here."""

from __future__ import annotations

from functools import cache

from torch import nn


@cache
def register() -> None:
    """Registers the out-of-tree layers with vLLM, once per process."""
    from vllm_kunlun.layers import activation, embedding, logits, norm, rotary

    for module in (activation, embedding, logits, norm, rotary):
        module.register()


def use_ops(model: nn.Module) -> None:
    """Hands to the op contract what a loaded model's layers do themselves: products, and heads before attention."""
    from vllm_kunlun.layers import linear, qkv

    linear.use_ops(model)
    qkv.use_ops(model)
