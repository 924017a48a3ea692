"""Questions about the vendor's kernels on which their callers disagree, answered at start by calls on tiny tensors.

Each answer decides between two ways of calling that are both right on some build. Nothing here runs in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun.targets.p800.probe import VendorStack

PREFILL = "kunlun_ops.prefill_attention"
DECODE = "kunlun_ops.speculative_attention"
WRITE = "kunlun_ops.reshape_and_cache"

# One request of a few keys in a block, one query, one head, of sizes that every caller uses.
_KEYS, _WINDOW, _BLOCK, _HEAD = 5, 2, 16, 64


class UnexpectedAnswer(RuntimeError):
    """A kernel's result fits none of the ways in which it is known to behave."""


@dataclass(frozen=True)
class Answers:
    """`…_window_counts_own`: a window counts the query's own key, as W of "the last W keys" does; None: no window.

    `paged_prefill_heeds_window`, `…_sinks`: whether prefill over the paged cache follows these arguments.
    `slot_dtype`: the integer type in which the cache write reads slots right; vLLM's own where it can.
    """

    prefill_window_counts_own: bool
    decode_window_counts_own: bool | None
    paged_prefill_heeds_window: bool
    paged_prefill_heeds_sinks: bool
    slot_dtype: torch.dtype


def ask(stack: VendorStack, device: torch.device) -> Answers:
    """Asks the installed kernels; waits for the device. Raises UnexpectedAnswer."""
    prefill = _Prefill(stack.function(PREFILL), device)
    dense = prefill.seen(paged=False, swa_left=_WINDOW, swa_right=0)
    paged = prefill.seen(paged=True, swa_left=_WINDOW, swa_right=0)
    if paged not in (dense, _KEYS):
        raise UnexpectedAnswer(f"{PREFILL}: a window of {_WINDOW} shows {dense} dense keys and {paged} paged ones")
    return Answers(
        prefill_window_counts_own=_counts_own(PREFILL, dense),
        decode_window_counts_own=_decode_window(stack, device),
        paged_prefill_heeds_window=paged == dense,
        paged_prefill_heeds_sinks=prefill.heeds_sink(),
        slot_dtype=_slot_dtype(stack.function(WRITE), device),
    )


def _counts_own(name: str, seen: int) -> bool:
    if seen not in (_WINDOW, _WINDOW + 1):
        raise UnexpectedAnswer(f"{name}: a window of {_WINDOW} over {_KEYS} keys shows {seen} of them")
    return seen == _WINDOW


def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys that all weigh the same and values that tell which of them were seen, [_KEYS, 1, _HEAD] float16."""
    value = torch.zeros(_KEYS, 1, _HEAD, dtype=torch.float16)
    value[range(_KEYS), 0, range(_KEYS)] = 1
    return torch.zeros_like(value).to(device), value.to(device)


def _paged(rows: Tensor) -> Tensor:
    """Rows as the only block of a cache, [1, 1, _BLOCK, _HEAD]."""
    return torch.nn.functional.pad(rows.transpose(0, 1), (0, 0, 0, _BLOCK - _KEYS)).unsqueeze(0).contiguous()


def _seen(out: Tensor) -> int:
    return int((out > 0).sum())


def _pair(values: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    host = torch.tensor(values, dtype=torch.int32)
    return host, host.to(device, copy=True)


@dataclass(frozen=True)
class _Prefill:
    function: Callable[..., Any]
    device: torch.device

    def call(self, paged: bool, **options: Any) -> Tensor:
        """What one query sees of _KEYS keys, [1, 1, _HEAD]."""
        key, value = _keys(self.device)
        query, out = key[:1].clone(), torch.zeros_like(key[:1])
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.device) if paged else None
        queries, keys = _pair([0, 1], self.device), _pair([0, _KEYS], self.device)
        if paged:
            key, value = _paged(key), _paged(value)
        self.function(
            q=query, k=key, v=value, out=out, is_causal=True, is_prefix_cache=paged, block_table=table,
            context_qlen_lod_cpu=queries[0], context_qlen_lod_xpu=queries[1], context_kvlen_lod_cpu=keys[0],
            context_kvlen_lod_xpu=keys[1], **options,
        )  # fmt: skip
        return out

    def seen(self, paged: bool, **options: Any) -> int:
        """How many keys the query sees."""
        return _seen(self.call(paged, **options))

    def heeds_sink(self) -> bool:
        """Whether a sink takes its share of the weights: as great as that of all keys here, or 1."""
        sink = torch.full((1,), float(_KEYS), device=self.device).log()
        total = float(self.call(True, sink=sink).float().sum())
        if min(abs(total - 0.5), abs(total - 1.0)) > 0.01:
            raise UnexpectedAnswer(f"{PREFILL}: with a sink as heavy as all keys, they get {total:.3f} of the weight")
        return total < 0.75


def _decode_window(stack: VendorStack, device: torch.device) -> bool | None:
    keyword = stack.keyword(DECODE, "max_window_size")
    if keyword is None:
        return None
    key, value = _keys(device)
    query, out = key[:1].clone(), torch.zeros_like(key[:1])
    host, there = _pair([_KEYS], device)
    stack.function(DECODE)(
        out=out, q=query.unsqueeze(0), k_cache=_paged(key), v_cache=_paged(value), context_lens_cpu=host,
        context_lens_xpu=there, batch_num=1, qlen=1, max_context_len=_BLOCK, head_num=1, head_dim=_HEAD,
        scale=1.0, kv_head_num=1, block_size=_BLOCK, max_num_blocks_per_seq=1,
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device), **{keyword: _WINDOW},
    )  # fmt: skip
    return _counts_own(DECODE, _seen(out))


def _slot_dtype(write: Callable[..., Any], device: torch.device) -> torch.dtype:
    for dtype in (torch.int64, torch.int32):
        if _writes_right(write, dtype, device):
            return dtype
    raise UnexpectedAnswer(f"{WRITE}: neither int64 nor int32 slots are written to their places")


def _writes_right(write: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two rows land in slots 9 and 2; int64 read as int32 would send the second to slot 0."""
    rows = torch.ones(2, 1, _HEAD, dtype=torch.float16, device=device)
    caches = [torch.zeros(1, 1, _BLOCK, _HEAD, dtype=torch.float16, device=device) for _ in range(2)]
    try:
        write(rows, rows.clone(), *caches, torch.tensor([9, 2], dtype=dtype, device=device))
        written = [cache[0, 0].sum(-1).nonzero().flatten().tolist() for cache in caches]
    except (ValueError, RuntimeError):  # how the vendor's bindings refuse a call
        return False
    return written == [[2, 9], [2, 9]]
