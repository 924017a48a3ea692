"""Paged attention of the host target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from vllm_kunlun.targets.host.profile import HOST

_DECODER_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


@dataclass
class HostAttentionMetadata(AttentionMetadata):
    """One step's batch: what `torch.ops.kunlun.paged_attention` takes, shared by all layers of a KV cache group.

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs]; block_table: int32 [num_reqs, max_blocks];
    slot_mapping: int64 [num_tokens].
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class HostMetadataBuilder(AttentionMetadataBuilder[HostAttentionMetadata]):
    """Passes vLLM's step buffers on: on this target they already are what the kernel reads."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HostAttentionMetadata:
        """One step's metadata."""
        common = common_attn_metadata
        return HostAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
        )


class HostAttentionBackend(AttentionBackend):
    """Paged GQA with sliding window, soft cap, sinks and ALiBi, in float32, bfloat16 or float16."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(HOST.dtypes)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HostAttentionImpl]:
        """The per-layer implementation."""
        return HostAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[HostMetadataBuilder]:
        """The per-step metadata builder."""
        return HostMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Any block size."""
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The profile's."""
        return HOST.default_block_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any up to 512."""
        return head_size in HOST.head_sizes

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

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, block_size, 2 * head_size]: a token's key, then its value."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class HostAttentionImpl(AttentionImpl[HostAttentionMetadata]):
    """Attention of one layer."""

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
            raise ValueError(f"this model's attention asks for {given}, which the host target does not support")
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
            size = self.head_size
            torch.ops.kunlun.reshape_and_cache(kv_cache[..., :size], kv_cache[..., size:], key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HostAttentionMetadata | None,
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

    def _paged(
        self, query: torch.Tensor, kv_cache: torch.Tensor, step: HostAttentionMetadata, output: torch.Tensor
    ) -> None:
        torch.ops.kunlun.paged_attention(
            output,
            query,
            kv_cache[..., : self.head_size],
            kv_cache[..., self.head_size :],
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            self.scale,
            step.causal,
            self.window_left,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
        )

    def _without_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: HostAttentionMetadata,
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
        )
