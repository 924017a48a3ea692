"""Activation layers."""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import activation as upstream


def _half(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


class KunlunSiluAndMul(upstream.SiluAndMul):
    """silu(x[..., :d]) * x[..., d:]."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]."""
        out = _half(x)
        torch.ops.kunlun.silu_and_mul(out, x)
        return out


class KunlunGeluAndMul(upstream.GeluAndMul):
    """gelu(x[..., :d]) * x[..., d:]."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]."""
        out = _half(x)
        torch.ops.kunlun.gelu_and_mul(out, x, self.approximate == "tanh")
        return out


class KunlunSwigluOAIAndMul(upstream.SwigluOAIAndMul):
    """The clamped gate of gpt-oss, gate and up interleaved."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]."""
        out = _half(x)
        torch.ops.kunlun.swiglu_oai(out, x, self.alpha, self.limit)
        return out


class _Gelu:
    kind: str

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops.kunlun.gelu(out, x, self.kind)
        return out


_GELUS = {"GELU": "none", "GELUTanh": "tanh", "NewGELU": "new", "FastGELU": "fast", "QuickGELU": "quick"}


def register() -> None:
    """Registers all of them with vLLM."""
    for layer in (KunlunSiluAndMul, KunlunGeluAndMul, KunlunSwigluOAIAndMul):
        CustomOp.register_oot(layer, name=layer.__mro__[1].__name__)
    for name, kind in _GELUS.items():
        base = getattr(upstream, name)
        CustomOp.register_oot(type(f"Kunlun{name}", (_Gelu, base), {"kind": kind}), name=name)
