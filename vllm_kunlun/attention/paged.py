"""Paged attention as all targets have it: vLLM's interface over the op contract."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType, MultipleOf

from vllm_kunlun.targets.profile import Profile

_DECODER_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


@dataclass
class PagedMetadata(AttentionMetadata):
    """One step's batch: what `torch.ops.kunlun.paged_attention` takes, shared by all layers of a KV cache group.

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs]; block_table: int32 [num_reqs, max_blocks];
    slot_mapping: int64 [num_tokens]. The `_cpu` ones are host copies, for targets whose kernels want them.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None


class PagedAttentionBackend(AttentionBackend):
    """Paged GQA with sliding window, sinks and ALiBi, in float32, bfloat16 or float16; subclasses set ``profile``."""

    profile: ClassVar[Profile]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    def __init_subclass__(cls) -> None:
        """Takes the dtypes from the profile."""
        super().__init_subclass__()
        cls.supported_dtypes = list(cls.profile.dtypes)

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Any block size."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The profile's."""
        return cls.profile.default_block_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Those of the profile."""
        return head_size in cls.profile.head_sizes

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks (gpt-oss)."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Bidirectional attention over the paged cache."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, and encoders without a cache."""
        return attn_type in _DECODER_TYPES


class PagedAttentionImpl(AttentionImpl[PagedMetadata]):
    """Attention of one layer; subclasses say where keys and values lie in the cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unsupported: Any,
    ) -> None:
        given = {name: value for name, value in unsupported.items() if value not in (None, False, -1)}
        if given:
            raise ValueError(f"this model's attention asks for {given}, which no target of vllm-kunlun supports")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.window_right = self.window_left if attn_type != AttentionType.DECODER else 0
        self.soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.attn_type = attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    @abstractmethod
    def key_and_value(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_blocks, num_kv_heads, block_size, head_size] of a layer's cache."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key and value [num_tokens, num_kv_heads, head_size] to their slots."""
        if self.attn_type == AttentionType.DECODER and kv_cache.numel() > 0:
            torch.ops.kunlun.reshape_and_cache(*self.key_and_value(kv_cache), key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fills output [num_tokens, num_heads, head_size]; rows that belong to no request become zero."""
        if attn_metadata is None:  # a profile run without a batch
            return output.zero_()
        if self.attn_type == AttentionType.DECODER:
            self._paged(query, kv_cache, attn_metadata, output)
        else:
            self._without_cache(query, key, value, attn_metadata, output)
        return output

    def _paged(self, query: torch.Tensor, kv_cache: torch.Tensor, step: PagedMetadata, output: torch.Tensor) -> None:
        torch.ops.kunlun.paged_attention(
            output,
            query,
            *self.key_and_value(kv_cache),
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            self.scale,
            step.causal,
            self.window_left,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
            step.query_start_loc_cpu,
            step.seq_lens_cpu,
        )

    def _without_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: PagedMetadata,
        output: torch.Tensor,
    ) -> None:
        torch.ops.kunlun.varlen_attention(
            output,
            query,
            key,
            value,
            step.query_start_loc,
            step.query_start_loc,
            self.scale,
            False,
            self.window_left,
            self.window_right,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
            step.query_start_loc_cpu,
            step.query_start_loc_cpu,
        )
