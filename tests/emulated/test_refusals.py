"""Every rule of the contract refuses a call that breaks it, in the vendor's words and in ours."""

import re

import pytest
import torch

from tests.emulated.calls import decode, offsets, prefill
from vllm_kunlun.emulator import NotEmulatedYet, VendorRefusal


def refused(match):
    return pytest.raises(VendorRefusal, match=match)


def test_refusal_has_the_vendors_line_and_then_the_broken_rule(stack, randn):
    import kunlun_ops

    with pytest.raises(ValueError) as caught:
        kunlun_ops.rmsnorm(randn(8, 4).t(), randn(8), torch.empty(4, 8))
    first, second = str(caught.value).splitlines()
    assert re.fullmatch(r"Check 0 == ret failed .*rmsnorm failed", first)
    assert second.startswith("Vendor contract of kunlun_ops.rmsnorm: x is not contiguous")


def test_a_refused_call_writes_nothing(stack, randn):
    import kunlun_ops

    out = torch.full((3, 8), 7.0)
    with refused("weight"):
        kunlun_ops.rmsnorm(randn(3, 8), randn(9), out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"x": torch.randn(3, 16)[:, ::2]}, "x is not contiguous"),
        ({"output": torch.empty(8, 3).t()}, "output is not contiguous"),
        ({"x": torch.randn(3, 8, dtype=torch.float64)}, "x is float64 and must be"),
        ({"output": torch.empty(3, 8, dtype=torch.float16)}, "output is float16 and must be float32"),
        ({"weight": torch.randn(7)}, "the dimension H is 7 and should be 8"),
        ({"output": torch.empty(4, 8)}, "others have"),
        ({"weight": torch.randn(1, 8)}, "weight has shape"),
        ({"output": torch.empty(1, 8).expand(3, 8)}, "not contiguous"),
    ],
)
def test_layout_rules(stack, change, rule):
    import kunlun_ops

    arguments = {"x": torch.randn(3, 8), "weight": torch.randn(8), "output": torch.empty(3, 8)} | change
    with refused(rule):
        kunlun_ops.rmsnorm(**arguments)


def test_written_arguments_share_memory_with_no_other(stack, randn):
    import kunlun_ops

    x, weight = randn(2, 3, 8), randn(8)
    with refused("residual_output is written and shares memory with x"):
        kunlun_ops.add_rmsnorm(x[0], x[1], weight=weight, output=torch.empty(3, 8), residual_output=x[0])
    with refused("output is written and shares memory with x"):
        kunlun_ops.gemma_rmsnorm(x[0], weight, x[0])
    rows = randn(5, 8)
    with refused("output is written and shares memory with x"):
        kunlun_ops.rmsnorm(rows[:3], weight, rows[1:4])


def test_interleaved_views_share_no_memory(stack, randn):
    import kunlun_ops

    cache = randn(3, 2, 1, 4, 8)
    kunlun_ops.reshape_and_cache_flash(
        randn(1, 1, 8), randn(1, 1, 8), cache[:, 0], cache[:, 1], torch.tensor([2]), BLHD_LAYOUT=False
    )
    with refused("key_cache is written and shares memory with value_cache"):
        kunlun_ops.reshape_and_cache_flash(
            randn(1, 1, 8), randn(1, 1, 8), cache[:, 0], cache[:, 0], torch.tensor([2]), BLHD_LAYOUT=False
        )


def test_wrong_keywords_and_types_are_type_errors(stack, randn):
    import kunlun_ops

    x, weight, out = randn(2, 4), randn(4), torch.empty(2, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        kunlun_ops.rmsnorm(x, weight, out, epsilon=1e-6)
    with pytest.raises(TypeError, match="missing a required argument: 'output'"):
        kunlun_ops.rmsnorm(x, weight)
    with pytest.raises(TypeError, match="too many positional"):
        kunlun_ops.add_rmsnorm(x, x, weight)
    with pytest.raises(TypeError, match="'eps' must be float, not str"):
        kunlun_ops.rmsnorm(x, weight, out, "small")
    with pytest.raises(TypeError, match="'weight' must be tensor, not NoneType"):
        kunlun_ops.rmsnorm(x, None, out)


def test_values_that_no_caller_passes_are_refused(stack, randn):
    import kunlun_ops

    with refused("turn is False; no caller passes anything but True"):
        kunlun_ops.silu_and_mul(randn(2, 8), turn=False, out=torch.empty(2, 4))


def test_numbers_agree_with_the_dimensions(stack, randn):
    cache, table = randn(4, 2, 4, 32), torch.zeros(1, 3, dtype=torch.int32)
    query = randn(1, 1, 2, 32)
    for name, value in {"head_num": 3, "kv_head_num": 1, "block_size": 8, "batch_num": 2, "head_dim": 64}.items():
        with refused(f"should be {value}"):
            decode(query, cache, cache, [3], table, **{name: value})
    with refused("max_num_blocks_per_seq is 4 and must be MB = 3"):
        decode(query, cache, cache, [3], table, max_num_blocks_per_seq=4)


def test_limits_say_what_they_limit(stack, randn):
    with refused("head sizes the existing plugin accepts .D = 48"):
        prefill(*(randn(3, 1, 48) for _ in range(3)), [3], [3])
    with refused("each KV head serves"):
        prefill(randn(3, 3, 32), randn(3, 2, 32), randn(3, 2, 32), [3], [3])
    with refused("no more than 128 columns"):
        ids = torch.zeros(1, 129, dtype=torch.int64)
        torch.ops.xspeedgate_ops.compute_token_logprobs(randn(1, 200), ids)


def test_forms_need_and_exclude_arguments(stack, randn):
    cache, table = randn(4, 2, 4, 32), torch.zeros(1, 3, dtype=torch.int32)
    query = randn(2, 2, 32)
    with refused("block_table is missing"):
        import kunlun_ops

        lod = offsets([2])
        kunlun_ops.prefill_attention(
            q=query, k=cache, v=cache, out=torch.empty_like(query), is_causal=True, is_prefix_cache=True,
            context_qlen_lod_cpu=lod, context_qlen_lod_xpu=lod, context_kvlen_lod_cpu=lod, context_kvlen_lod_xpu=lod,
        )  # fmt: skip
    with refused("k has shape"):
        prefill(query, cache, cache, [2], [2])
    with refused("k has shape"):
        prefill(query, query, query, [2], [2], block_table=table)


@pytest.mark.parametrize(
    ("device", "rule"),
    [
        (torch.tensor([0, 3, 4], dtype=torch.int32), "must hold the same values"),
        (torch.tensor([0, 2, 5], dtype=torch.int64), "int64 and must be int32"),
        (torch.tensor([0, 5], dtype=torch.int32), r"the dimension B\+1 is 2 and should be 3"),
    ],
)
def test_host_and_device_copies_are_equal(stack, randn, device, rule):
    import kunlun_ops

    x, host = randn(5, 1, 32), torch.tensor([0, 2, 5], dtype=torch.int32)
    with refused(rule):
        kunlun_ops.prefill_attention(
            q=x, k=x, v=x, out=torch.empty_like(x), is_causal=True, context_qlen_lod_cpu=host,
            context_qlen_lod_xpu=device, context_kvlen_lod_cpu=host, context_kvlen_lod_xpu=host.clone(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("lod", "rule"),
    [
        ([1, 2, 5], "start with 0"),
        ([0, 4, 3], "never fall"),
        ([0, 2, 6], "ends at 6, past the rows"),
    ],
)
def test_offsets_are_offsets(stack, randn, lod, rule):
    import kunlun_ops

    x, lod = randn(5, 1, 32), torch.tensor(lod, dtype=torch.int32)
    with refused(rule):
        kunlun_ops.prefill_attention(
            q=x, k=x, v=x, out=torch.empty_like(x), is_causal=True, context_qlen_lod_cpu=lod,
            context_qlen_lod_xpu=lod, context_kvlen_lod_cpu=lod, context_kvlen_lod_xpu=lod,
        )  # fmt: skip


def test_causal_queries_have_keys(stack, randn):
    with refused("4 causal queries and 2 keys"):
        prefill(randn(4, 1, 32), randn(2, 1, 32), randn(2, 1, 32), [4], [2])


@pytest.mark.parametrize(("length", "row"), [(9, [0, 1]), (5, [0, 6]), (5, [-1, 0])])
def test_reads_outside_the_block_table_are_refused(stack, randn, length, row):
    cache, table = randn(6, 1, 4, 32), torch.tensor([row], dtype=torch.int32)
    with refused("outside the block table"):
        decode(randn(1, 1, 1, 32), cache, cache.clone(), [length], table)
    with refused("outside the block table"):
        prefill(randn(1, 1, 32), cache, cache.clone(), [1], [length], block_table=table)


def test_entries_past_a_requests_length_are_never_read(stack, randn):
    cache, table = randn(6, 1, 4, 32), torch.tensor([[2, 999]], dtype=torch.int32)
    assert not decode(randn(1, 1, 1, 32), cache, cache.clone(), [4], table).isnan().any()


def test_slots_ids_and_positions_are_in_range(stack, randn):
    import kunlun_ops

    key, cache = randn(1, 1, 8), randn(2, 3, 1, 4, 8)
    with refused(r"slot_mapping holds 12, which is past the end \(NB\*BS = 12\)"):
        kunlun_ops.reshape_and_cache(key, key, cache[0], cache[1], torch.tensor([12]))
    with refused("positions holds 9"):
        kunlun_ops.rotary_embedding(torch.tensor([9]), randn(1, 8), randn(1, 8), 8, randn(9, 8), True)
    with refused("token_ids holds -1"):
        torch.ops.xspeedgate_ops.compute_token_logprobs(randn(1, 5), torch.tensor([[-1]]))


def test_context_longer_than_promised_is_refused(stack, randn):
    cache, table = randn(2, 1, 4, 32), torch.tensor([[0, 1]], dtype=torch.int32)
    with refused("context_lens_cpu holds 6"):
        decode(randn(1, 1, 1, 32), cache, cache.clone(), [6], table, max_context_len=5)


def test_contiguous_cache_is_needed_where_strides_are_ignored(stack, randn):
    import kunlun_ops

    cache, key = randn(3, 2, 1, 4, 8), randn(1, 1, 8)
    with refused("key_cache is not contiguous"):
        kunlun_ops.reshape_and_cache(key, key, cache[:, 0], cache[:, 1], torch.tensor([0]))


def test_known_callables_without_arithmetic_say_so(stack, randn):
    import kunlun_ops

    with pytest.raises(NotEmulatedYet, match=r"kunlun_ops.moe_post was called; the emulator does not emulate it yet"):
        kunlun_ops.moe_post(randn(2, 1, 4), None, None, None, None)
    with pytest.raises(NotImplementedError, match="only its name is known"):
        kunlun_ops.decode_paged_attention(q=randn(2))
    with pytest.raises(NotImplementedError, match="only its name is known"):
        torch.ops.xspeedgate_ops.ranks_kernel(randn(2))
    with pytest.raises(NotImplementedError, match="form 'latent'"):
        cache, lengths = randn(4, 1, 4, 576), torch.tensor([3], dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        kunlun_ops.paged_attention(
            torch.empty(1, 1, 2, 512), randn(1, 1, 2, 576), cache, None, table, lengths, lengths, False, True, -1, 512,
            64, 0.1, q_r=randn(1, 1, 2, 576),
        )  # fmt: skip


def test_outputs_are_poisoned_before_they_are_written(stack, randn):
    from vllm_kunlun.emulator.results import poison

    for dtype, spoiled in (
        (torch.float16, lambda t: t.isnan()),
        (torch.int8, lambda t: t == -128),
        (torch.bool, lambda t: t),
    ):
        tensor = torch.zeros(3, dtype=dtype)
        poison(tensor)
        assert spoiled(tensor).all()


def test_empty_calls_work(stack):
    import kunlun_ops

    kunlun_ops.rmsnorm(torch.empty(0, 8), torch.ones(8), torch.empty(0, 8))
    kunlun_ops.reshape_and_cache(
        torch.empty(0, 1, 8), torch.empty(0, 1, 8), *torch.zeros(2, 2, 1, 4, 8), torch.empty(0, dtype=torch.int64)
    )
    assert prefill(*(torch.empty(0, 1, 32) for _ in range(3)), [0], [0]).shape == (0, 1, 32)
