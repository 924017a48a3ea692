"""A trial of each known fault: a case of the op that meets it, and the vendor's callable called in the obvious way.

The cases lie in the region that the vendor contract gives, so that the obvious call is wrong or refused on a build that
has the fault, and right on one that has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kunlun import ops
from vllm_kunlun.ops.contract import Case, Op
from vllm_kunlun.tools.selftest.judging import Arguments
from vllm_kunlun.tools.selftest.vendor_calls import Vendor

HALF, SINGLE = torch.float16, torch.float32
_HEAD, _BLOCK = 64, 16
_FLASH = "kunlun_ops.reshape_and_cache_flash"
_LARGEST_EMULATED = 64 << 20


@dataclass(frozen=True)
class Trial:
    """`obvious` writes the case's outputs with the vendor's callable.

    `used` says whether an op of the contract meets it. Where none does, `op` stands for what the callable should
    compute and is no op of the contract.
    """

    op: Op
    case: Case
    obvious: Callable[[Vendor, Arguments], None]
    used: bool = True


def _trial(name: str, case: Case, obvious: Callable[[Vendor, Arguments], None]) -> Trial:
    return Trial(ops.ops()[name], case, obvious)


def _unused(schema: str, reference: Callable[..., None], case: Case, obvious: Callable[..., None]) -> Trial:
    op = Op("unused", schema, reference, cases=lambda generator, dtype: iter((case,)))
    return Trial(op, case, obvious, used=False)


class NotTried(Exception):
    """A fault cannot be tried here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What trials are made from: random numbers, and the thresholds that the faults have here."""

    generator: torch.Generator
    parameters: Callable[[str], Mapping[str, int]]
    emulated: bool

    def randn(self, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def attention(self, queries: list[int], keys: list[int], dtype: torch.dtype = HALF, **options: Any) -> Arguments:
        """Arguments of paged_attention, two heads over one KV head, a block or more of each request in turn."""
        block = options.pop("block_size", _BLOCK)
        starts, lengths = _starts(queries), torch.tensor(keys, dtype=torch.int32)
        columns, rows = -(-max(keys) // block), sum(queries) + options.pop("pad", 0)
        blocks = min(8, columns * len(keys))
        table = torch.arange(columns * len(keys), dtype=torch.int32).view(len(keys), columns) % blocks
        cache = self.randn(2, blocks, 1, block, _HEAD, dtype=dtype)
        return {
            "out": torch.empty(rows, 2, _HEAD, dtype=dtype), "query": self.randn(rows, 2, _HEAD, dtype=dtype),
            "key_cache": cache[0], "value_cache": cache[1], "block_table": table, "query_start_loc": starts,
            "seq_lens": lengths, "scale": _HEAD**-0.5, "causal": True, "window_left": -1, "softcap": 0.0,
            "alibi_slopes": None, "sinks": None, "query_start_loc_cpu": starts.clone(),
            "seq_lens_cpu": lengths.clone(), **options,
        }  # fmt: skip

    def packed(self, tokens: int, **options: Any) -> Arguments:
        """Arguments of varlen_attention for one request."""
        query, key, value = (self.randn(tokens, 2, _HEAD, dtype=SINGLE) for _ in range(3))
        starts = _starts([tokens])
        return {
            "out": torch.empty_like(query), "query": query, "key": key, "value": value, "query_start_loc": starts,
            "key_start_loc": starts.clone(), "scale": _HEAD**-0.5, "causal": True, "window_left": -1,
            "window_right": -1, "softcap": 0.0, "alibi_slopes": None, "sinks": None,
            "query_start_loc_cpu": starts.clone(), "key_start_loc_cpu": starts.clone(), **options,
        }  # fmt: skip

    def writes(self, heads: int, tokens_first: bool = False) -> Arguments:
        """Arguments of reshape_and_cache: six tokens of which one goes nowhere."""
        key, value = self.randn(6, heads, _HEAD), self.randn(6, heads, _HEAD)
        shape = (2, 3, _BLOCK, heads, _HEAD) if tokens_first else (2, 3, heads, _BLOCK, _HEAD)
        cache = torch.zeros(*shape, dtype=HALF)
        caches = [half.transpose(1, 2) if tokens_first else half for half in cache]
        slots = torch.tensor([0, 1, 17, 3, -1, 40])
        return {"key_cache": caches[0], "value_cache": caches[1], "key": key, "value": value, "slot_mapping": slots}


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _batch_limit(bench: Bench) -> Trial:
    requests = bench.parameters("decode-batch-limit")["batch"]
    args = bench.attention([1] * requests, [1 + i % 5 for i in range(requests)])
    return _trial("paged_attention", Case(f"decode of {requests} requests", HALF, args), Vendor.decode)


def _float32_blocks(bench: Bench) -> Trial:
    block = bench.parameters("decode-float32-block-64")["smallest"]
    args = bench.attention([1, 1, 1], [1, 40, 70], SINGLE, block_size=block)
    return _trial("paged_attention", Case(f"float32 decode, blocks of {block}", SINGLE, args), Vendor.decode)


def _value_slots(bench: Bench) -> Trial:
    case = Case("cache write of 2 KV heads", HALF, bench.writes(2))

    def obvious(vendor: Vendor, args: Arguments) -> None:
        vendor.write(_FLASH, {**args, "slot_mapping": args["slot_mapping"].int()}, BLHD_LAYOUT=False)

    return _trial("reshape_and_cache", case, obvious)


def _window(bench: Bench) -> Trial:
    case = Case("window of 4 keys over 9 tokens", SINGLE, bench.packed(9, window_left=3))
    return _trial("varlen_attention", case, lambda vendor, args: vendor.prefill(args, swa_left=4, swa_right=0))


def _paged_sinks(bench: Bench) -> Trial:
    sinks = torch.tensor([0.5, 2.0])
    case = Case("sinks over a cached prefix", HALF, bench.attention([3], [8], sinks=sinks))
    return _trial("paged_attention", case, lambda vendor, args: vendor.prefill(args, sink=args["sinks"]))


def _alternating(bench: Bench) -> Trial:
    buffer = bench.randn(8, 2, 1, _BLOCK, _HEAD)
    args = bench.attention([1] * 4, [1, 20, 33, 7])
    args |= {"key_cache": buffer[:, 0], "value_cache": buffer[:, 1]}
    return _trial("paged_attention", Case("blocks of keys and values in turn", HALF, args), Vendor.decode)


def _partial_rotary(bench: Bench) -> Trial:
    half = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.5, 0.25, 0.125]))
    args = {
        "positions": torch.tensor([3, 1, 4]), "query": bench.randn(3, 2 * 16), "key": bench.randn(3, 16),
        "head_size": 16, "cos_sin_cache": torch.cat((half.cos(), half.sin()), -1).to(HALF), "is_neox": True,
    }  # fmt: skip

    def obvious(vendor: Vendor, args: Arguments) -> None:
        vendor.function("kunlun_ops.rotary_embedding")(*args.values())

    return _trial("rotary_embedding", Case("8 of 16 elements of a head turn", HALF, args), obvious)


def _gated_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    gate, up = (x @ weight[0].t()).chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _fused_activation(bench: Bench) -> Trial:
    rows = bench.parameters("fused-activation-from-1024-rows")["rows"]
    args = {"out": torch.empty(rows, 16, dtype=HALF), "x": bench.randn(rows, 32), "weight": bench.randn(1, 32, 32)}

    def obvious(vendor: Vendor, args: Arguments) -> None:
        x = args["x"]
        lod = torch.tensor([0, rows], dtype=torch.int32, device=x.device)
        index = torch.arange(rows, dtype=torch.int32, device=x.device)
        y = torch.empty(rows, 1, 32, dtype=HALF, device=x.device)
        vendor.function("kunlun_ops.moe_fc")(
            x=x, weight=args["weight"], sorted_tokens_num_lod=lod, sorted_tokens_idx=index, moe_topk=1, y=y,
            act="SWISH_GLU",
        )  # fmt: skip
        args["out"].copy_(y[:, 0, :16])

    case = Case(f"{rows} rows through one expert", HALF, args)
    return _unused("(Tensor(a!) out, Tensor x, Tensor weight) -> ()", _gated_product, case, obvious)


def _wide_linear(bench: Bench) -> Trial:
    n, k = (bench.parameters("linear-wide-output")[name] for name in "nk")
    if bench.emulated and 2 * n * k > _LARGEST_EMULATED:
        raise NotTried(
            f"a weight of {n} x {k} is too much for the emulator; linear-wide-output:n=96:k=16 makes it small"
        )
    args = {"out": torch.empty(1, n, dtype=HALF), "input": bench.randn(1, k), "weight": bench.randn(n, k)}

    def obvious(vendor: Vendor, args: Arguments) -> None:
        with torch.inference_mode():
            args["out"].copy_(torch.nn.functional.linear(args["input"], args["weight"]))

    return _trial("linear", Case(f"one row, {k} to {n}", HALF, {**args, "bias": None}), obvious)


def _exponential(bench: Bench) -> Trial:
    if not bench.emulated:
        raise NotTried("a call does not tell that it went through the host; a profile does")
    args = {"ids": torch.full((4,), -1), "logits": bench.randn(4, 50, dtype=SINGLE),
            "uniform": torch.rand(4, generator=bench.generator, dtype=torch.float64)}  # fmt: skip
    args["logits"][:, 7] = 200.0  # certain, so that any noise draws it

    def obvious(vendor: Vendor, args: Arguments) -> None:
        noise = torch.empty_like(args["logits"]).exponential_()
        args["ids"].copy_((args["logits"].softmax(-1) / noise).argmax(-1))

    return _trial("sample", Case("one choice from each of 4 rows", SINGLE, args), obvious)


def _slot_type(bench: Bench) -> Trial:
    case = Case("slots as vLLM makes them, int64", HALF, bench.writes(1))
    return _trial("reshape_and_cache", case, lambda vendor, args: vendor.write("kunlun_ops.reshape_and_cache", args))


def _norm_weight(bench: Bench) -> Trial:
    angles = torch.outer(torch.arange(8.0), 10000.0 ** (-torch.arange(0, _HEAD, 2) / _HEAD))
    outs = {name: torch.empty(2, _HEAD, dtype=HALF) for name in ("query", "key", "value")}
    weights = bench.randn(2, _HEAD)
    args = {
        **outs, "qkv": bench.randn(2, 3 * _HEAD), "positions": torch.tensor([2, 5]),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), -1).to(HALF), "q_weight": weights[0],
        "k_weight": weights[1], "num_heads": 1, "num_kv_heads": 1, "head_size": _HEAD, "epsilon": 1e-6,
        "weight_offset": 1.0, "is_neox": True,
    }  # fmt: skip

    def obvious(vendor: Vendor, args: Arguments) -> None:
        found = vendor.function("xspeedgate_ops.split_norm_rope_neox")(
            qkv=args["qkv"], q_weights=args["q_weight"], k_weights=args["k_weight"], positions=args["positions"],
            cos_sin_cache=args["cos_sin_cache"], q_size=_HEAD, kv_size=_HEAD, num_q_heads=1, num_kv_heads=1,
            head_dim=_HEAD, rotary_dim=_HEAD, attn_output_gate=False,
        )  # fmt: skip
        for out, result in zip((args["query"], args["key"], args["value"]), found, strict=False):
            out.copy_(result)

    return _trial("split_norm_rope", Case("norm of weight 1 + w, rotation of 2 tokens", HALF, args), obvious)


def _layout_default(bench: Bench) -> Trial:
    case = Case("cache with tokens before heads", HALF, bench.writes(2, tokens_first=True))

    def obvious(vendor: Vendor, args: Arguments) -> None:
        caches = {name: args[name].transpose(1, 2) for name in ("key_cache", "value_cache")}
        vendor.write(_FLASH, {**args, **caches, "slot_mapping": args["slot_mapping"].int()})

    return _trial("reshape_and_cache", case, obvious)


def _window_keyword(bench: Bench) -> Trial:
    args = bench.attention([1] * 4, [1, 2, 3, 1], window_left=3)  # wide enough to be the same under either reading
    case = Case("decode with a window", HALF, args)
    return _trial("paged_attention", case, lambda vendor, args: vendor.decode(args, max_window_size=4))


def _pad_rows(bench: Bench) -> Trial:
    case = Case("decode of 3 requests and 2 pad rows", HALF, bench.attention([1] * 3, [1, 2, 3], pad=2))
    return _trial("paged_attention", case, Vendor.decode)


def _alpha(bench: Bench) -> Trial:
    case = Case("scale 0.3, head size 64", SINGLE, bench.packed(5, scale=0.3))
    return _trial("varlen_attention", case, lambda vendor, args: vendor.prefill(args, alpha=args["scale"]))


def _scale_zero(bench: Bench) -> Trial:
    args = bench.attention([1], [3], scale=0.0)
    return _trial("paged_attention", Case("scale 0: all keys weigh the same", HALF, args), Vendor.decode)


def _masked_input(bench: Bench) -> Trial:
    ids = torch.tensor([0, 50, 99, 105])
    bounds = {"org_start": 50, "org_end": 100, "num_org_padding": 14, "added_start": 105, "added_end": 110}
    args = {"local_ids": torch.empty_like(ids), "outside": torch.empty(4, dtype=torch.bool), "ids": ids, **bounds}

    def obvious(vendor: Vendor, args: Arguments) -> None:
        found = vendor.function("xspeedgate_ops.get_masked_input_and_mask")(*list(args.values())[2:])
        args["local_ids"].copy_(found[0])
        args["outside"].copy_(found[1])

    return _trial("vocab_parallel_mask", Case("ids of two ranks", SINGLE, args), obvious)


def _presence(name: str) -> Callable[[Bench], Trial]:
    """A callable that no op uses yet: the trial is whether it is there."""

    def obvious(vendor: Vendor, args: Arguments) -> None:
        vendor.stack.require([name])
        args["out"].zero_()

    case = Case("whether it is installed", SINGLE, {"out": torch.zeros(1)})
    return lambda bench: _unused("(Tensor(a!) out) -> ()", lambda out: out.zero_(), case, obvious)


TRIALS: Mapping[str, Callable[[Bench], Trial]] = {
    "decode-batch-limit": _batch_limit,
    "decode-float32-block-64": _float32_blocks,
    "value-slots-several-kv-heads": _value_slots,
    "sliding-window-off-by-one": _window,
    "prefix-path-ignores-window-and-sinks": _paged_sinks,
    "paged-view-address": _alternating,
    "partial-rotary-crash": _partial_rotary,
    "fused-activation-from-1024-rows": _fused_activation,
    "linear-wide-output": _wide_linear,
    "exponential-on-host": _exponential,
    "slot-mapping-int32-only": _slot_type,
    "split-norm-rope-plain-weight": _norm_weight,
    "blhd-layout-default-false": _layout_default,
    "max-window-size-absent": _window_keyword,
    "masked-input-absent": _masked_input,
    "moe-pre-small-absent": _presence("xspeedgate_ops.moe_pre_small"),
    "inplace-exponential-absent": _presence("xspeedgate_ops.inplace_exponential"),
    "weak-ref-tensor-absent": _presence("xspeedgate_ops.weak_ref_tensor"),
    "pad-rows-unwritten": _pad_rows,
    "alpha-on-top-of-head-size": _alpha,
    "decode-scale-zero-is-default": _scale_zero,
}
"""By the fault's name in the vendor contract. max-instead-of-scale belongs to ops that do not exist yet."""
