"""Paged attention of the p800 target."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_kunlun.attention.paged import PagedAttentionBackend, PagedAttentionImpl, PagedMetadata
from vllm_kunlun.ops.providers.p800.vendor import in_region
from vllm_kunlun.targets.p800.profile import P800
from vllm_kunlun.targets.profile import Profile


class P800MetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Keeps a step's lengths on the host and on the device, in buffers that graphs find again.

    Requests that only fill up a graph's batch get one key, of the null block, which is zero: their rows of the output
    are zero too, without a kernel that clears them.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        requests = vllm_config.scheduler_config.max_num_seqs
        self._starts_cpu = current_platform.host_buffer(requests + 1, torch.int32)
        self._lengths_cpu = current_platform.host_buffer(requests, torch.int32)
        self._lengths = torch.zeros(requests, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """One step's metadata. Nothing waits for the device: the host's lengths come from the scheduler."""
        common = common_attn_metadata
        known = common.seq_lens_cpu_upper_bound
        assert known is not None and isinstance(common.causal, bool), "the P800 builder serves vLLM's own model runner"
        requests = common.num_reqs
        self._starts_cpu[: requests + 1].copy_(common.query_start_loc_cpu[: requests + 1])
        torch.clamp(known[:requests], min=1, out=self._lengths_cpu[:requests])
        torch.clamp(common.seq_lens[:requests], min=1, out=self._lengths[:requests])
        return PagedMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=self._lengths[:requests],
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            query_start_loc_cpu=self._starts_cpu[: requests + 1],
            seq_lens_cpu=self._lengths_cpu[:requests],
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedMetadata:
        """Metadata of the longest requests there may be: a graph keeps the host's lengths, and none may exceed them."""
        step = self.build(0, common_attn_metadata)
        longest = self.vllm_config.model_config.max_model_len
        step.seq_lens.fill_(longest)
        cast(torch.Tensor, step.seq_lens_cpu).fill_(longest)
        return step


class P800AttentionImpl(PagedAttentionImpl):
    """Attention of one layer over a cache with all keys before all values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.soft_cap:
            raise ValueError(
                f"this model caps its attention logits at {self.soft_cap}, and the vendor's attention of the P800 has"
                " no soft cap. Set VLLM_KUNLUN_TARGET=host to run it on the CPU."
            )

    def key_and_value(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The halves of the cache, each contiguous: the kernels compute a block's address from its number alone."""
        return kv_cache[0], kv_cache[1]


class P800AttentionBackend(PagedAttentionBackend):
    """Paged attention of the vendor's kernels."""

    profile: ClassVar[Profile] = P800

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The profile's, or for a dtype that the decode kernel takes in small blocks only, vLLM's."""
        model = get_current_vllm_config().model_config
        size = cls.profile.default_block_size
        refused = in_region("decode-float32-block-64", (("q", model.dtype),), block_size=size)
        return default_block_size if refused else size

    @staticmethod
    def get_impl_cls() -> type[P800AttentionImpl]:
        """The per-layer implementation."""
        return P800AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[P800MetadataBuilder]:
        """The per-step metadata builder."""
        return P800MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[2, num_blocks, num_kv_heads, block_size, head_size]: all keys, then all values."""
        return (2, num_blocks, num_kv_heads, block_size, head_size)
