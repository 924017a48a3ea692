"""Paged attention of the host target."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_kunlun.attention.paged import PagedAttentionBackend, PagedAttentionImpl, PagedMetadata
from vllm_kunlun.targets.host.profile import HOST
from vllm_kunlun.targets.profile import Profile


class HostMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Passes vLLM's step buffers on: on this target they already are what the kernel reads."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """One step's metadata."""
        common = common_attn_metadata
        return PagedMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
        )


class HostAttentionImpl(PagedAttentionImpl):
    """Attention of one layer over a cache whose rows hold a token's key, then its value."""

    def key_and_value(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The halves of each row."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


class HostAttentionBackend(PagedAttentionBackend):
    """Paged attention of the host's kernels, soft cap included."""

    profile: ClassVar[Profile] = HOST

    @staticmethod
    def get_impl_cls() -> type[HostAttentionImpl]:
        """The per-layer implementation."""
        return HostAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[HostMetadataBuilder]:
        """The per-step metadata builder."""
        return HostMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, block_size, 2 * head_size]: a token's key, then its value."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)
