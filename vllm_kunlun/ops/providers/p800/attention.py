"""Attention: kunlun_ops.speculative_attention for decode, kunlun_ops.prefill_attention for the rest.

A step's batch has its decodes first. They go to the decode kernel in parts below its batch limit; requests of several
queries, and what the decode kernel cannot do, go to the other one, over the paged cache. Lengths and offsets come from
the host and from the device; the host reads its own copies only. Decode alone takes one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.ops.providers.p800.batch import (
    Offsets,
    check_causal,
    decode_parts,
    host_numbers,
    leading_decodes,
    offsets_from,
    offsets_of,
    zero_keyless,
)
from vllm_kunlun.ops.providers.p800.dense import dense, settle
from vllm_kunlun.ops.providers.p800.pages import Pages, pages_of
from vllm_kunlun.ops.providers.p800.vendor import Implementation, Refused, Vendor, check_limits, in_region
from vllm_kunlun.targets.p800.questions import DECODE, PREFILL


class Step:
    """The options that all requests of a call share."""

    def __init__(
        self,
        op: str,
        query: Tensor,
        kv_heads: int,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        if softcap > 0:
            raise Refused(op, f"softcap is {softcap}, and the vendor's attention has no soft cap of the logits")
        check_limits(op, PREFILL, D=query.size(2), Hq=query.size(1), Hk=kv_heads)
        self.op = op
        self.scale = scale
        self.causal = causal
        self.window_left, right = window
        self.window_right = 0 if causal else right
        self.alibi_slopes = None if alibi_slopes is None else alibi_slopes.float()
        # The kernels take sinks in float32 only.
        self.sinks = None if sinks is None else sinks.float()

    @property
    def windowed(self) -> bool:
        """Whether some keys that come before a query are out of its sight, or some that come after."""
        return self.window_left >= 0 or (not self.causal and self.window_right >= 0)


class Prefill:
    """Calls of kunlun_ops.prefill_attention."""

    def __init__(self, vendor: Vendor) -> None:
        self._function: Callable[..., Any] = vendor.function(PREFILL)
        self._answers = vendor.answers

    def dense(
        self, step: Step, out: Tensor, query: Tensor, key: Tensor, value: Tensor, queries: Offsets, keys: Offsets
    ) -> None:
        """Over packed keys and values, [Tk, Hk, D]."""
        self._call(step, out, query, key, value, queries, keys, is_prefix_cache=False)

    def paged(
        self, step: Step, out: Tensor, query: Tensor, pages: Pages, table: Tensor, queries: Offsets, keys: Offsets
    ) -> None:
        """Over the cache; over a packed copy of it where the paged form would ignore the window or the sinks."""
        if not self._heeded(step):
            key, value = pages.gathered(table, keys.device, keys.total)
            self.dense(step, out, query, key, value, queries, keys)
            return
        self._call(step, out, query, pages.key, pages.value, queries, keys, is_prefix_cache=True, block_table=table)

    def _heeded(self, step: Step) -> bool:
        window = self._answers.paged_prefill_heeds_window or not step.windowed
        return window and (self._answers.paged_prefill_heeds_sinks or step.sinks is None)

    def _call(
        self,
        step: Step,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: Offsets,
        keys: Offsets,
        **form: Any,
    ) -> None:
        own = 1 if self._answers.prefill_window_counts_own else 0
        self._function(
            q=query.contiguous(), k=key, v=value, out=out, is_causal=step.causal,
            alpha=step.scale * query.size(2) ** 0.5, context_qlen_lod_cpu=queries.host,
            context_qlen_lod_xpu=queries.device, context_kvlen_lod_cpu=keys.host, context_kvlen_lod_xpu=keys.device,
            alibi_slopes=step.alibi_slopes, sink=step.sinks,
            swa_left=step.window_left + own if step.window_left >= 0 else -1,
            swa_right=step.window_right if step.windowed else -1, **form,
        )  # fmt: skip


class Decode:
    """Calls of kunlun_ops.speculative_attention with one query of each request."""

    def __init__(self, vendor: Vendor) -> None:
        self._function: Callable[..., Any] = vendor.function(DECODE)
        self._window_counts_own = vendor.answers.decode_window_counts_own

    def serves(self, step: Step, dtype: torch.dtype, block_size: int) -> bool:
        """Whether the kernel can do what the step asks for. A scale of 0 means another scale to it."""
        if step.alibi_slopes is not None or step.scale == 0.0:
            return False
        if step.window_left >= 0 and self._window_counts_own is None:
            return False
        return not in_region("decode-float32-block-64", (("q", dtype),), block_size=block_size)

    def __call__(
        self, step: Step, out: Tensor, query: Tensor, pages: Pages, table: Tensor, lengths: Tensor, seq_lens: Tensor
    ) -> None:
        """`lengths` on the host and `seq_lens` on the device hold the number of keys of each request."""
        _, heads, size = query.shape
        kv_heads, block_size = pages.key.shape[1:3]
        columns = table.size(1)
        options: dict[str, Any] = {"sink": step.sinks}
        if step.window_left >= 0:
            options["max_window_size"] = step.window_left + (1 if self._window_counts_own else 0)
        for part in decode_parts(query.size(0)):
            self._function(
                out=out[part], q=query[part].contiguous().unsqueeze(0), k_cache=pages.key, v_cache=pages.value,
                context_lens_cpu=lengths[part], context_lens_xpu=seq_lens[part],
                batch_num=part.stop - part.start, qlen=1, max_context_len=columns * block_size, head_num=heads,
                head_dim=size, scale=step.scale, kv_head_num=kv_heads, block_size=block_size,
                max_num_blocks_per_seq=columns, block_tables=table[part], **options,
            )  # fmt: skip


def paged_attention(vendor: Vendor) -> Implementation:
    """The op `paged_attention`; needs both host copies. A causal request of more queries than keys is refused."""
    op = "paged_attention"
    prefill, decode = Prefill(vendor), Decode(vendor)

    def run(
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        causal: bool,
        window_left: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        query_start_loc_cpu: Tensor | None = None,
        seq_lens_cpu: Tensor | None = None,
    ) -> None:
        starts = host_numbers(op, "query_start_loc_cpu", query_start_loc_cpu)
        requests, total = len(starts) - 1, int(starts[-1])
        lengths = host_numbers(op, "seq_lens_cpu", seq_lens_cpu)[:requests]
        step = Step(op, query, key_cache.size(1), scale, causal, (window_left, -1), softcap, alibi_slopes, sinks)
        pages = pages_of(op, key_cache, value_cache)
        table, written = pages.table(block_table[:requests]), dense(out)
        decodes = leading_decodes(starts) if decode.serves(step, query.dtype, key_cache.size(2)) else 0
        if total < written.size(0):
            written[total:].zero_()
        if decodes:
            rows = slice(0, decodes)
            decode(step, written[rows], query[rows], pages, table[rows], torch.from_numpy(lengths), seq_lens)
            zero_keyless(written[rows], lengths[:decodes], seq_lens)
        if total > decodes:
            check_causal(op, causal, starts[decodes:], lengths[decodes:])
            queries = offsets_from(decodes, starts, query_start_loc)
            keys = offsets_of(lengths[decodes:], seq_lens[decodes:requests])
            rows = slice(decodes, total)
            prefill.paged(step, written[rows], query[rows], pages, table[decodes:], queries, keys)
        settle(out, written)

    return run


def varlen_attention(vendor: Vendor) -> Implementation:
    """The op `varlen_attention`; needs both host copies."""
    op = "varlen_attention"
    prefill = Prefill(vendor)

    def run(
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        scale: float,
        causal: bool,
        window_left: int,
        window_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        query_start_loc_cpu: Tensor | None = None,
        key_start_loc_cpu: Tensor | None = None,
    ) -> None:
        starts = host_numbers(op, "query_start_loc_cpu", query_start_loc_cpu)
        key_starts = host_numbers(op, "key_start_loc_cpu", key_start_loc_cpu)
        window = (window_left, window_right)
        step = Step(op, query, key.size(1), scale, causal, window, softcap, alibi_slopes, sinks)
        check_causal(op, causal, starts, key_starts[1:] - key_starts[:-1])
        total, written = int(starts[-1]), dense(out)
        if total < written.size(0):
            written[total:].zero_()
        if total:
            queries = offsets_from(0, starts, query_start_loc)
            keys = offsets_from(0, key_starts, key_start_loc)
            prefill.dense(step, written[:total], query[:total], key, value, queries, keys)
        settle(out, written)

    return run
