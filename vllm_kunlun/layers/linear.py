"""Unquantized linear and embedding layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty((flat.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    torch.ops.kunlun.linear(out, flat, weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def _weight(layer: nn.Module) -> torch.Tensor:
    """The layer's parameter as a plain tensor: vLLM's parameter classes make every op call slower."""
    return cast(torch.Tensor, layer.weight).detach()


class KunlunLinearMethod(UnquantizedLinearMethod):
    """x @ weight.T + bias through the op contract."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight = _weight(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., in_features]; weight: [out_features, in_features]."""
        return _linear(x, self.weight, bias)


class KunlunEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Token embedding, and the head's product, through the op contract."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., hidden_size]; weight: [vocab_size, hidden_size]."""
        return _linear(x, _weight(layer), bias)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """input_: int64 [num_tokens]."""
        weight = _weight(layer)
        out = torch.empty((*input_.shape, weight.shape[1]), dtype=weight.dtype, device=input_.device)
        torch.ops.kunlun.embedding(out.view(-1, out.shape[-1]), input_.flatten(), weight)
        return out


def use_ops(model: nn.Module) -> None:
    """Replaces the unquantized methods of `model`'s layers; quantized layers keep theirs."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method) is UnquantizedLinearMethod:
            module.quant_method = KunlunLinearMethod(module)
        elif type(method) is UnquantizedEmbeddingMethod:
            module.quant_method = KunlunEmbeddingMethod()
