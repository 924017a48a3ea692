"""LoRA products on the host target: one pair of matrix products per adapter in the batch.

vLLM 0.25.1's own CPU wrapper indexes the adapter table with -1 for tokens without an adapter, which gives them the last
adapter, and gathers one copy of the weights per token. Here tokens are grouped by adapter once per step.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

Group = tuple[int, torch.Tensor]


def _groups(indices: torch.Tensor) -> list[Group]:
    """(adapter slot, rows that use it) for every adapter in `indices`; -1 means no adapter."""
    slots = [slot for slot in torch.unique(indices).tolist() if slot >= 0]
    return [(slot, (indices == slot).nonzero().flatten()) for slot in slots]


def _matrix(stacked: torch.Tensor, slot: int) -> torch.Tensor:
    """[max_loras, 1, out, in] or [max_loras, out, in] -> [out, in] of one adapter."""
    weight = stacked[slot]
    return weight[0] if weight.dim() == 3 else weight


class HostPunicaWrapper(PunicaWrapperBase):
    """Shapes: x [num_tokens, in]; a_stacked [max_loras, 1, rank, in]; b_stacked [max_loras, 1, out, rank]."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._token_groups: list[Group] = []
        self._sampler_groups: list[Group] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Takes the step's adapter of each token from vLLM and groups the tokens."""
        super().update_metadata(*args, **kwargs)
        self.regroup()

    def regroup(self) -> None:
        """Groups the step's tokens, and those that are sampled, by adapter."""
        self._token_groups = _groups(self.token_lora_indices)
        self._sampler_groups = _groups(self.sampler_indices)

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any
    ) -> None:
        """y[i] += x @ a[i].T * scale, in y's dtype, for each slice i."""
        for out, stacked in zip(y, lora_a_stacked, strict=True):
            for slot, rows in self._token_groups:
                product = x[rows].to(out.dtype) @ _matrix(stacked, slot).to(out.dtype).T
                out.index_add_(0, rows, product, alpha=scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y[:, slice i] += x[i] @ b[i].T; the slices lie side by side from `offset_start` on."""
        flat = y.view(-1, y.shape[-1])
        offset = offset_start
        for part, stacked, width in zip(x, lora_b_stacked, output_slices, strict=True):
            self._expand(flat[:, offset : offset + width], part, stacked, self._token_groups)
            offset += width

    def _expand(self, y: torch.Tensor, x: torch.Tensor, stacked: torch.Tensor, groups: list[Group]) -> None:
        for slot, rows in groups:
            weight = _matrix(stacked, slot)[: y.shape[1]]
            product = x[rows].float() @ weight.float().T
            y[rows, : weight.shape[0]] += product.to(y.dtype)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y += x @ b.T; x is the embedding's shrunk half."""
        self._expand(y.view(-1, y.shape[-1]), x, lora_b_stacked, self._token_groups)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """y[:, slice i] += (x @ a[i].T) @ b[i].T * scale, the inner product in float32."""
        x = x.view(-1, x.shape[-1])
        ranks = [stacked.shape[-1] for stacked in lora_b_stacked]
        shrunk = [torch.zeros((x.shape[0], rank), dtype=torch.float32, device=x.device) for rank in ranks]
        self.add_shrink(shrunk, x, lora_a_stacked, scale)
        self.add_expand(y, shrunk, lora_b_stacked, output_slices)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """y += (x @ a.T) @ b.T * scale for the rows that are sampled."""
        flat_y, flat_x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._sampler_groups:
            shrunk = flat_x[rows].float() @ _matrix(lora_a_stacked, slot).float().T * scale
            product = shrunk @ _matrix(lora_b_stacked, slot).float().T
            flat_y[rows, : product.shape[1]] += product.to(y.dtype)
