"""The vendor's callables as somebody would call them who knows their signatures and none of their faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.targets.p800.contract import Contract
from vllm_kunlun.targets.p800.probe import VendorStack
from vllm_kunlun.tools.selftest.judging import Arguments

PREFILL = "kunlun_ops.prefill_attention"
DECODE = "kunlun_ops.speculative_attention"


@dataclass(frozen=True)
class Vendor:
    """The installed callables, by the names and keywords of the contract."""

    stack: VendorStack

    @property
    def contract(self) -> Contract:
        """The vendor contract."""
        return self.stack.contract

    def function(self, name: str) -> Callable[..., Any]:
        """A callable that takes the contract's keywords; raises MissingVendorOps without it."""
        function, generation = self.stack.function(name), self.stack.generation
        arguments = self.contract.op(name).arguments_in(generation)
        names = {argument.name: self.stack.keyword(name, argument.name) or argument.name for argument in arguments}
        return lambda *args, **kwargs: function(*args, **{names.get(key, key): kwargs[key] for key in kwargs})

    def decode(self, args: Arguments, **options: Any) -> None:
        """The op paged_attention for one query of each request."""
        query, cache, table = args["query"], args["key_cache"], args["block_table"]
        lengths = args["seq_lens_cpu"]
        requests, (heads, size) = lengths.numel(), query.shape[1:]
        self.function(DECODE)(
            out=args["out"][:requests], q=query[:requests].contiguous().unsqueeze(0), k_cache=cache,
            v_cache=args["value_cache"], context_lens_cpu=lengths, context_lens_xpu=args["seq_lens"],
            batch_num=requests, qlen=1, max_context_len=table.size(1) * cache.size(2), head_num=heads, head_dim=size,
            scale=args["scale"], kv_head_num=cache.size(1), block_size=cache.size(2),
            max_num_blocks_per_seq=table.size(1), block_tables=table, **options,
        )  # fmt: skip

    def prefill(self, args: Arguments, **options: Any) -> None:
        """The op varlen_attention, or paged_attention where there is a cache."""
        paged = "key_cache" in args
        total = int(args["query_start_loc_cpu"][-1])
        key, value = (args["key_cache"], args["value_cache"]) if paged else (args["key"], args["value"])
        keys = (_offsets(args["seq_lens_cpu"]), _offsets(args["seq_lens"])) if paged else _key_offsets(args)
        alpha = args["scale"] * args["query"].size(2) ** 0.5
        self.function(PREFILL)(
            q=args["query"][:total].contiguous(), k=key, v=value, out=args["out"][:total], is_causal=args["causal"],
            is_prefix_cache=paged, block_table=args["block_table"] if paged else None,
            context_qlen_lod_cpu=args["query_start_loc_cpu"], context_qlen_lod_xpu=args["query_start_loc"],
            context_kvlen_lod_cpu=keys[0], context_kvlen_lod_xpu=keys[1], **{"alpha": alpha, **options},
        )  # fmt: skip

    def write(self, name: str, args: Arguments, **options: Any) -> None:
        """The op reshape_and_cache through one of the two callables, with slots of the type that the case has."""
        names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        self.function(name)(*(args[name] for name in names), **options)


def _offsets(lengths: Tensor) -> Tensor:
    start = torch.zeros(1, dtype=torch.int32, device=lengths.device)
    return torch.cat((start, lengths.cumsum(0, dtype=torch.int32)))


def _key_offsets(args: Arguments) -> tuple[Tensor, Tensor]:
    return args["key_start_loc_cpu"], args["key_start_loc"]
