"""RMS norm layers."""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _normalise(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, offset: float
) -> Normed:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        # The heads of a fused qkv product are not evenly spaced from token to token: reshape copies those.
        torch.ops.kunlun.rms_norm(out.view(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), weight, epsilon, offset)
        return out
    torch.ops.kunlun.fused_add_rms_norm(out, x, residual, weight, epsilon, offset)
    return out, residual


class KunlunRMSNorm(RMSNorm):
    """out = x / rms(x) * weight; with a residual, the sum is normalised and returned too."""

    def is_plain(self) -> bool:
        """Whether it is what the op computes: over the whole row, with a weight."""
        return self.has_weight and self.variance_size_override is None

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """x, residual: [..., hidden_size]."""
        if not self.is_plain():
            return self.forward_native(x, residual)
        return _normalise(x, residual, self.weight, self.variance_epsilon, 0.0)


class KunlunGemmaRMSNorm(GemmaRMSNorm):
    """As KunlunRMSNorm with weight + 1, as Gemma stores it."""

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """x, residual: [..., hidden_size]."""
        return _normalise(x, residual, self.weight, self.variance_epsilon, 1.0)


def register() -> None:
    """Registers both with vLLM."""
    CustomOp.register_oot(KunlunRMSNorm, name="RMSNorm")
    CustomOp.register_oot(KunlunGemmaRMSNorm, name="GemmaRMSNorm")
