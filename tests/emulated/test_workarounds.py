"""The P800 provider under each known fault that touches an op of the contract.

With the fault on, the provider's op is right; the vendor's callable, called in the obvious way, is not.
"""

from dataclasses import replace

import pytest
import torch

from tests.contract.checking import check
from tests.contract.test_p800 import judge
from tests.emulated import formulas
from tests.emulated.calls import decode, prefill
from tests.emulated.formulas import close
from tests.emulated.provider import implementations, in_target_layout
from vllm_kunlun import emulator, ops
from vllm_kunlun.emulator import VendorRefusal
from vllm_kunlun.ops.contract import Case
from vllm_kunlun.ops.providers.p800 import attention, batch, linear, vendor
from vllm_kunlun.ops.providers.p800.vendor import Vendor
from vllm_kunlun.targets.p800 import questions
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.probe import Found, probe

CONTRACT = load()
REQUESTS = torch.Generator().manual_seed(5)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=REQUESTS).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# Ops of the contract whose implementation meets the fault, or would.
TOUCHED = {
    "decode-batch-limit": ["paged_attention"],
    "decode-float32-block-64": ["paged_attention"],
    "sliding-window-off-by-one": ["paged_attention", "varlen_attention"],
    "prefix-path-ignores-window-and-sinks": ["paged_attention"],
    "paged-view-address": ["paged_attention"],
    "max-window-size-absent": ["paged_attention"],
    "value-slots-several-kv-heads": ["reshape_and_cache"],
    "slot-mapping-int32-only": ["reshape_and_cache"],
    "blhd-layout-default-false": ["reshape_and_cache"],
    "partial-rotary-crash": ["rotary_embedding", "split_norm_rope"],
    "split-norm-rope-plain-weight": ["split_norm_rope"],
    "linear-wide-output": ["linear", "logits"],
    "masked-input-absent": ["vocab_parallel_mask"],
    "exponential-on-host": ["sample"],
}
OTHER_OPS = {
    "fused-activation-from-1024-rows", "moe-pre-small-absent", "inplace-exponential-absent", "weak-ref-tensor-absent",
}  # fmt: skip
ON_BOTH = [
    (fault, generation)
    for fault in TOUCHED
    for generation in Generation
    if generation in CONTRACT.fault(fault).generations
]


def test_every_switchable_fault_is_accounted_for():
    switchable = {name for name, fault in CONTRACT.faults.items() if not fault.always}
    assert switchable == TOUCHED.keys() | OTHER_OPS


def hold(names, served, dtypes=(torch.float16, torch.float32)):
    """All cases of the ops are right, or refused for the reason they always are."""
    for op in (ops.ops()[name] for name in names):
        for dtype in [dtype for dtype in dtypes if dtype in op.dtypes]:
            for case in op.cases(torch.Generator().manual_seed(7), dtype):
                judge(op, in_target_layout(case), served[op.name])


@pytest.mark.parametrize(("fault", "generation"), ON_BOTH, ids=[f"{f}-{g.value}" for f, g in ON_BOTH])
def test_contract_cases_hold_with_a_fault(fault, generation):
    with emulator.running(generation.value, faults=[fault]):
        hold(TOUCHED[fault], implementations())


@pytest.mark.parametrize("generation", list(Generation))
def test_contract_cases_hold_with_all_faults_at_once(generation):
    faults = [name for name in TOUCHED if generation in CONTRACT.fault(name).generations]
    with emulator.running(generation.value, faults=faults):
        hold(sorted({name for fault in faults for name in TOUCHED[fault]}), implementations(), [torch.float16])


def decode_case(requests, dtype=torch.float16, block_size=16, heads=(2, 1), size=32, **changes):
    """One query of each request, with 1 to 5 keys in one of eight blocks."""
    lengths, blocks = int32(*[1 + i % 5 for i in range(requests)]), 8
    cache = randn(2, blocks, heads[1], block_size, size, dtype=dtype)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    args = {
        "out": torch.empty(requests, heads[0], size, dtype=dtype),
        "query": randn(requests, heads[0], size, dtype=dtype),
        "key_cache": cache[0], "value_cache": cache[1],
        "block_table": (torch.arange(requests, dtype=torch.int32) % blocks).unsqueeze(1), "query_start_loc": starts,
        "seq_lens": lengths, "scale": size**-0.5, "causal": True, "window_left": -1, "softcap": 0.0,
        "alibi_slopes": None, "sinks": None, "query_start_loc_cpu": starts.clone(), "seq_lens_cpu": lengths.clone(),
    }  # fmt: skip
    return Case(f"decode of {requests}", dtype, {**args, **changes})


def attends_right(case, served, launched=None):
    """Whether the provider's attention is right; `launched` receives the vendor's launches."""
    op = ops.ops()["paged_attention"]
    with emulator.launches() as record:
        check(op, case, served["paged_attention"])
    if launched is not None:
        launched.extend(record.vendor)
    return True


def test_parts_of_a_decode_batch_stay_below_the_table_s_limit():
    limit = CONTRACT.fault("decode-batch-limit").parameters["batch"]
    for requests, calls in ((1, 1), (limit - 1, 1), (limit, 2), (2 * limit - 1, 3)):
        parts = list(batch.decode_parts(requests))
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(requests))
        assert len(parts) == calls and max(part.stop - part.start for part in parts) < limit


@pytest.mark.parametrize("generation", ["torch25", "torch29"])
@pytest.mark.parametrize(("requests", "calls"), [(15, 1), (16, 2), (31, 3)])
def test_decode_is_split_below_the_batch_limit(monkeypatch, generation, requests, calls):
    small = replace(vendor.fault("decode-batch-limit"), parameters={"batch": 16})
    monkeypatch.setattr(batch, "fault", lambda name: small)
    case, launched = decode_case(requests), []
    with emulator.running(generation, faults=["decode-batch-limit:batch=16"]):
        assert attends_right(case, implementations(), launched)
        args = case.args
        if requests >= 16:
            with pytest.raises(VendorRefusal, match="decode-batch-limit"):
                decode(
                    args["query"].unsqueeze(1), args["key_cache"], args["value_cache"],
                    args["seq_lens"].tolist(), args["block_table"],
                )  # fmt: skip
    assert launched == ["kunlun_ops.speculative_attention"] * calls


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("one decode", ["speculative_attention"]),
        ("mixed", ["speculative_attention", "prefill_attention"]),
        ("chunk after a long context", ["prefill_attention"]),
        ("alibi", ["prefill_attention"]),
        ("decode 8 to 1", ["speculative_attention", "prefill_attention"]),
    ],
)
def test_decodes_at_the_front_of_a_batch_have_a_kernel_of_their_own(name, kernels):
    found = ops.ops()["paged_attention"].cases(torch.Generator().manual_seed(7), torch.float16)
    case, launched = in_target_layout(next(case for case in found if case.name == name)), []
    with emulator.running():
        assert attends_right(case, implementations(), launched)
    assert launched == [f"kunlun_ops.{kernel}" for kernel in kernels]


def test_float32_decode_over_large_blocks_takes_the_other_kernel():
    case, launched = decode_case(3, torch.float32, block_size=64), []
    with emulator.running(faults=["decode-float32-block-64"]):
        assert attends_right(case, implementations(), launched)
        args = case.args
        with pytest.raises(VendorRefusal, match="float32"):
            decode(args["query"].unsqueeze(1), args["key_cache"], args["value_cache"], [1, 2, 3], args["block_table"])
    assert launched == ["kunlun_ops.prefill_attention"]


def test_window_is_what_the_kernel_takes_it_for():
    query, key, value = randn(9, 2, 32), randn(9, 2, 32), randn(9, 2, 32)
    expected = formulas.attention(query, key, value, 32**-0.5, window=4)[0]
    starts, out = int32(0, 9), torch.empty_like(query)
    with emulator.running(faults=["sliding-window-off-by-one"]):
        arguments = (out, query, key, value, starts, starts, 32**-0.5, True, 3, 0, 0.0, None, None)
        implementations()["varlen_attention"](*arguments, starts.clone(), starts.clone())
        naive = prefill(query, key, value, [9], [9], swa_left=4, swa_right=0)
    assert close(out, expected)
    assert not close(naive, expected)


def test_decode_with_a_window_where_the_kernel_has_no_such_argument():
    case, launched = decode_case(4, window_left=1), []
    args = case.args
    with emulator.running(faults=["max-window-size-absent"]):
        assert attends_right(case, implementations(), launched)
        with pytest.raises(TypeError, match="max_window_size"):
            decode(
                args["query"].unsqueeze(1), args["key_cache"], args["value_cache"], [1, 2, 3, 4], args["block_table"],
                max_window_size=2,
            )  # fmt: skip
    assert launched == ["kunlun_ops.prefill_attention"]


@pytest.mark.parametrize("option", [{"window_left": 1}, {"sinks": torch.tensor([0.5, 2.0])}])
def test_windows_and_sinks_of_paged_prefill_are_heeded(option):
    starts, lengths = int32(0, 3), int32(8)
    case = decode_case(3, torch.float32, block_size=4, **option)
    changes = {
        "block_table": int32(2, 1).unsqueeze(0), "query_start_loc": starts, "query_start_loc_cpu": starts.clone(),
        "seq_lens": lengths, "seq_lens_cpu": lengths.clone(),
    }  # fmt: skip
    case, launched = replace(case, args={**case.args, **changes}), []
    args, op = case.args, ops.ops()["paged_attention"]
    with emulator.running(faults=["prefix-path-ignores-window-and-sinks"]):
        assert attends_right(case, implementations(), launched)
        passed = {"swa_left": 2, "swa_right": 0} if "window_left" in option else {"sink": option["sinks"]}
        naive = prefill(
            args["query"], args["key_cache"], args["value_cache"], [3], [8], block_table=args["block_table"], **passed
        )
    expected = torch.empty_like(args["out"])
    op.reference(*{**args, "out": expected}.values())
    assert not close(naive, expected)


def test_alternating_blocks_of_keys_and_values_are_read_right():
    buffer = randn(8, 2, 1, 16, 32, dtype=torch.float16)
    case = decode_case(4, key_cache=buffer[:, 0], value_cache=buffer[:, 1])
    args = case.args
    expected = torch.empty_like(args["out"])
    ops.ops()["paged_attention"].reference(*{**args, "out": expected}.values())
    with emulator.running(faults=["paged-view-address"]):
        implementations()["paged_attention"](*args.values())
        naive = decode(
            args["query"].unsqueeze(1), args["key_cache"], args["value_cache"], [1, 2, 3, 4], args["block_table"]
        )
    assert close(args["out"], expected, torch.float16)
    assert not close(naive[:, 0], expected, torch.float16)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_values_of_several_kv_heads_land_in_their_slots(heads):
    key, value, slots = randn(6, heads, 32), randn(6, heads, 32), torch.tensor([0, 1, 17, 3, -1, 40])
    cache, naive = torch.zeros(2, 3, heads, 16, 32), torch.zeros(2, 3, heads, 16, 32)
    expected = torch.zeros(2, 3, heads, 16, 32)
    ops.ops()["reshape_and_cache"].reference(*expected, key, value, slots)
    with emulator.running(faults=["value-slots-several-kv-heads"]):
        import kunlun_ops

        implementations()["reshape_and_cache"](*cache, key, value, slots)
        kunlun_ops.reshape_and_cache_flash(key, value, *naive, slots, BLHD_LAYOUT=False)
    assert torch.equal(cache, expected)
    assert torch.equal(naive, expected) == (heads == 1)


def test_slots_have_the_type_that_the_kernel_reads():
    key, slots, cache = randn(2, 1, 32), torch.tensor([5, 2]), torch.zeros(2, 1, 1, 16, 32)
    with emulator.running(faults=["slot-mapping-int32-only"]):
        import kunlun_ops

        implementations()["reshape_and_cache"](*cache, key, key, slots)
        with pytest.raises(VendorRefusal, match="int32"):
            kunlun_ops.reshape_and_cache(key, key, *cache, slots)
    assert torch.equal(cache[:, 0, 0, [5, 2]], key[:, 0].expand(2, 2, 32))


def test_a_part_of_a_head_is_rotated():
    turns, positions = formulas.frequencies(8), torch.tensor([3, 1, 4])
    query, key, table = randn(3, 2 * 16), randn(3, 16), formulas.cos_sin_cache(turns, 8)
    expected = [formulas.rotated(x.unflatten(-1, (-1, 16)), positions, turns, True).flatten(1) for x in (query, key)]
    with emulator.running(faults=["partial-rotary-crash"]):
        import kunlun_ops

        with pytest.raises(VendorRefusal, match="partial-rotary-crash"):
            kunlun_ops.rotary_embedding(positions, query.clone(), key.clone(), 16, table, True)
        implementations()["rotary_embedding"](positions, query, key, 16, table, True)
    assert close(query, expected[0])
    assert close(key, expected[1])


@pytest.fixture
def narrow_table(monkeypatch):
    """The thresholds of the wide product at 96 outputs and 16 inputs, in the table that the provider reads."""
    known = vendor.fault("linear-wide-output")
    narrow = replace(known, parameters={"n": 96, "k": 16})
    for module in (vendor, linear):
        monkeypatch.setattr(module, "fault", lambda name: narrow)
    for cached in (vendor.in_region, linear.column_parts):
        cached.cache_clear()
    yield
    for cached in (vendor.in_region, linear.column_parts):
        cached.cache_clear()


@pytest.mark.parametrize(("rows", "calls"), [(1, 2), (2, 1)])
def test_a_wide_product_of_one_row_is_split(narrow_table, rows, calls):
    x, weight, bias = randn(rows, 16, dtype=torch.float16), randn(96, 16, dtype=torch.float16), randn(96)
    expected = torch.einsum("mk,nk->mn", x.float(), weight.float())
    out, logits = torch.empty(rows, 96, dtype=torch.float16), torch.empty(rows, 96)
    with emulator.running(faults=["linear-wide-output:n=96:k=16"]), torch.inference_mode():
        served = implementations()
        with emulator.launches() as record:
            served["linear"](out, x, weight, bias)
            served["logits"](logits, x, weight, None)
        naive = torch.nn.functional.linear(x, weight)
    assert close(out, expected + bias, torch.float16) and close(logits, expected)
    assert record.vendor == ["kunlun_ops.matmul"] * 2 * calls
    assert close(naive, expected, torch.float16) == (rows == 2)


def test_parts_of_a_wide_product_stay_below_the_table_s_width():
    n, k = (CONTRACT.fault("linear-wide-output").parameters[name] for name in "nk")
    parts = linear.column_parts(torch.float16, 1, 2 * n, k)
    assert [(part.start, part.stop) for part in parts] == [(i * 165547, min((i + 1) * 165547, 2 * n)) for i in range(3)]
    assert all(part.stop - part.start < n for part in parts)
    for dtype, rows, columns, features in [
        (torch.bfloat16, 1, n, k), (torch.float16, 2, n, k), (torch.float16, 1, n - 1, k), (torch.float16, 1, n, k - 1),
    ]:  # fmt: skip
        assert linear.column_parts(dtype, rows, columns, features) == (slice(0, columns),)


def test_sampling_needs_no_exponential_noise():
    logits, uniform, ids = randn(4, 50), torch.rand(4, generator=REQUESTS), torch.empty(4, dtype=torch.int64)
    with emulator.running(faults=["exponential-on-host"]):
        served = implementations()
        with emulator.guard():
            served["sample"](ids, logits, uniform)
        with emulator.guard(), pytest.raises(emulator.HostRoundTrip, match=r"exponential_.*uniform noise"):
            (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)
    shares = logits.double().softmax(-1).cumsum(-1)
    assert ids.tolist() == [int((row <= u).sum()) for row, u in zip(shares, uniform.double(), strict=True)]


def test_a_vocabulary_is_split_without_the_vendors_callable():
    ids = torch.tensor([0, 50, 99, 105])
    local, outside = torch.empty_like(ids), torch.empty(4, dtype=torch.bool)
    with emulator.running(faults=["masked-input-absent"]):
        assert not hasattr(torch.ops.xspeedgate_ops, "get_masked_input_and_mask")
        implementations()["vocab_parallel_mask"](local, outside, ids, 50, 100, 14, 105, 110)
    assert local.tolist() == [0, 0, 49, 64]
    assert outside.tolist() == [True, False, False, False]


def test_the_scale_of_prefill_is_not_multiplied_by_that_of_the_head_size():
    query, key, value, starts = randn(5, 2, 64), randn(5, 2, 64), randn(5, 2, 64), int32(0, 5)
    expected, out = formulas.attention(query, key, value, 0.3)[0], torch.empty_like(query)
    with emulator.running():
        arguments = (out, query, key, value, starts, starts, 0.3, True, -1, -1, 0.0, None, None)
        implementations()["varlen_attention"](*arguments, starts.clone(), starts.clone())
        naive = prefill(query, key, value, [5], [5], alpha=0.3)
    assert close(out, expected)
    assert not close(naive, expected)


def test_rows_past_the_last_request_are_zero():
    case = decode_case(3)
    padded = {"query": randn(5, 2, 32, dtype=torch.float16), "out": torch.full((5, 2, 32), 7.0, dtype=torch.float16)}
    args = {**case.args, **padded}
    with emulator.running():
        implementations()["paged_attention"](*args.values())
    assert not args["out"][3:].any() and args["out"][:3].any()


def test_requests_without_keys_are_zero():
    lengths = int32(2, 0, 3)
    args = decode_case(3, seq_lens=lengths, seq_lens_cpu=lengths.clone()).args
    with emulator.running():
        implementations()["paged_attention"](*args.values())
    assert args["out"][[0, 2]].any(-1).all() and not args["out"][1].any()


def test_a_scale_of_zero_weighs_all_keys_alike():
    args = decode_case(1, torch.float32, scale=0.0, seq_lens=int32(3), seq_lens_cpu=int32(3)).args
    cache = args["value_cache"][args["block_table"][0, 0], 0]
    with emulator.running():
        implementations()["paged_attention"](*args.values())
        naive = decode(args["query"][:, None], args["key_cache"], args["value_cache"], [3], args["block_table"])
    mean = cache[:3].mean(0).expand(1, 2, 32)
    assert close(args["out"], mean)
    assert not close(naive[:, 0], mean)


def test_a_strided_cache_of_one_kv_head_is_written_heads_first():
    key, value, slots = randn(3, 1, 32), randn(3, 1, 32), torch.tensor([17, -1, 4])
    cache, expected = torch.zeros(2, 1, 16, 64), torch.zeros(2, 1, 16, 64)
    ops.ops()["reshape_and_cache"].reference(expected[..., :32], expected[..., 32:], key, value, slots)
    with emulator.running(faults=["value-slots-several-kv-heads", "blhd-layout-default-false"]):
        implementations()["reshape_and_cache"](cache[..., :32], cache[..., 32:], key, value, slots)
    assert expected.any() and torch.equal(cache, expected)


@pytest.mark.parametrize(("epsilon", "launches"), [(1e-6, 1), (1e-3, 6)])
def test_the_fused_norm_serves_only_the_epsilon_that_is_built_into_it(epsilon, launches):
    positions, table = torch.tensor([2, 5]), formulas.cos_sin_cache(formulas.frequencies(32), 8)
    qkv, weights = 0.01 * randn(2, 4 * 32), randn(2, 32)
    outs, expected = ([torch.empty(2, n * 32) for n in (2, 1, 1)] for _ in range(2))
    rest = (qkv, positions, table, *weights, 2, 1, 32, epsilon, 0.0, True)
    ops.ops()["split_norm_rope"].reference(*expected, *rest)
    with emulator.running():
        served = implementations()
        with emulator.launches() as record:
            served["split_norm_rope"](*outs, *rest)
    assert all(close(out, wanted) for out, wanted in zip(outs, expected, strict=True))
    assert len(record.launches) == launches


def test_a_causal_window_has_no_keys_ahead():
    passed = {}
    with emulator.running():
        stack = probe(emulator.current().settings.generation)
        known = Vendor(stack, questions.ask(stack, torch.device("cpu")))
        recording = Found(lambda **arguments: passed.update(arguments), None)
        found = {**stack.found, questions.PREFILL: recording}
        varlen = attention.varlen_attention(replace(known, stack=replace(stack, found=found)))
        query, starts = randn(2, 1, 32), int32(0, 2)
        for causal, ahead in ((True, 0), (False, 5)):
            options = (0.2, causal, 3, 5, 0.0, None, None, starts.clone(), starts.clone())
            varlen(torch.empty_like(query), query, query, query, starts, starts, *options)
            assert (passed["swa_left"], passed["swa_right"], passed["is_causal"]) == (4, ahead, causal)
