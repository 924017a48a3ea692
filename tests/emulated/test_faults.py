"""Each known fault: switched on it shows, its work-around holds, and switched off the same call is right."""

import math

import pytest
import torch

from tests.emulated import formulas
from tests.emulated.calls import decode, prefill
from tests.emulated.formulas import close, relative_l2
from vllm_kunlun import emulator
from vllm_kunlun.emulator import EmulatorSettingError, Settings, VendorRefusal
from vllm_kunlun.targets.p800.contract_load import load

REQUESTS = torch.Generator().manual_seed(3)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=REQUESTS).to(dtype)


def running(*faults, generation="torch29"):
    return emulator.running(generation, faults=faults, device=False)


def decode_batch(batch, calls, dtype=torch.float32, block_size=4):
    """Decodes a batch in so many calls; returns the result and the expected one."""
    lengths = [1 + i % 7 for i in range(batch)]
    cache = randn(2, 2, 1, block_size, 32, dtype=dtype)
    table = torch.tensor([[1, 0]] * batch, dtype=torch.int32)
    query = randn(batch, 1, 2, 32, dtype=dtype)
    share = -(-batch // calls)
    parts = [slice(i, min(i + share, batch)) for i in range(0, batch, share)]
    out = torch.cat([decode(query[p], *cache, lengths[p], table[p]) for p in parts])
    keys = [torch.cat((half[1, 0], half[0, 0]))[:, None].float() for half in cache]
    expected = [
        formulas.attention(query[i].float(), keys[0][: lengths[i]], keys[1][: lengths[i]], 32**-0.5)[0]
        for i in range(batch)
    ]
    return out, torch.stack(expected)


def test_decode_batch_limit():
    with running("decode-batch-limit:batch=16"):
        with pytest.raises(VendorRefusal, match="decode-batch-limit"):
            decode_batch(16, 1)
        assert close(*decode_batch(16, 2))
        assert close(*decode_batch(15, 1))
    with running():
        assert close(*decode_batch(16, 1))


def test_decode_batch_limit_is_1024_by_default():
    assert load().fault("decode-batch-limit").parameters == {"batch": 1024}
    with running("decode-batch-limit"):
        cache, table = randn(1, 1, 4, 32), torch.zeros(1024, 1, dtype=torch.int32)
        query = randn(1024, 1, 1, 32)
        with pytest.raises(VendorRefusal):
            decode(query, cache, cache.clone(), [1] * 1024, table)
        out = decode(query[1:], cache, cache.clone(), [1] * 1023, table[1:])
        assert torch.allclose(out, cache[0, 0, 0].expand(1023, 1, 1, 32))


def test_float32_decode_with_large_blocks():
    with running("decode-float32-block-64"):
        with pytest.raises(VendorRefusal, match="float32"):
            decode_batch(2, 1, block_size=64)
        assert close(*decode_batch(2, 1, block_size=16))
        assert close(*decode_batch(2, 1, torch.float16, block_size=64), torch.float16)
    with running():
        assert close(*decode_batch(2, 1, block_size=64))


def write_cache(heads, flash):
    import kunlun_ops

    key, value, slots = randn(6, heads, 8), randn(6, heads, 8), [0, 1, 2, 3, 9, 5]
    cache = torch.zeros(2, 3, heads, 4, 8)
    if flash:
        kunlun_ops.reshape_and_cache_flash(key, value, *cache, torch.tensor(slots), BLHD_LAYOUT=False)
    else:
        kunlun_ops.reshape_and_cache(key, value, *cache, torch.tensor(slots))
    back = [torch.stack([half[s // 4, :, s % 4] for s in slots]) for half in cache]
    return torch.equal(back[0], key), torch.equal(back[1], value)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_values_land_in_wrong_slots_with_several_kv_heads(heads):
    with running("value-slots-several-kv-heads"):
        assert write_cache(heads, flash=True) == (True, heads == 1)
        assert write_cache(heads, flash=False) == (True, True)
    with running():
        assert write_cache(heads, flash=True) == (True, True)


def windowed(window, passed):
    """Prefill and decode with a window; whether each is right."""
    query, key, value = (randn(9, 2, 32) for _ in range(3))
    expected = formulas.attention(query, key, value, 32**-0.5, window=window)[0]
    cache = torch.stack((key, value)).unflatten(1, (3, 3)).transpose(2, 3).contiguous()
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    prefilled = prefill(query, key, value, [9], [9], swa_left=passed, swa_right=0)
    decoded = decode(query[None, -1:], *cache, [9], table, max_window_size=passed)
    return close(prefilled, expected), close(decoded[0], expected[-1:])


def test_sliding_window_is_off_by_one():
    with running("sliding-window-off-by-one"):
        assert windowed(4, passed=4) == (False, False)
        assert windowed(4, passed=3) == (True, True)
    with running():
        assert windowed(4, passed=4) == (True, True)


def prefix_window(paged):
    query, key, value, sink = randn(3, 2, 32), randn(8, 2, 32), randn(8, 2, 32), randn(2)
    options = {"swa_left": 2, "swa_right": 0, "sink": sink}
    if paged:
        caches = [x.unflatten(0, (2, 4)).transpose(1, 2).contiguous() for x in (key, value)]
        out = prefill(query, *caches, [3], [8], block_table=torch.tensor([[0, 1]], dtype=torch.int32), **options)
    else:
        out = prefill(query, key, value, [3], [8], **options)
    return close(out, formulas.attention(query, key, value, 32**-0.5, window=2, sink=sink)[0])


def test_paged_prefill_ignores_window_and_sinks():
    with running("prefix-path-ignores-window-and-sinks"):
        assert not prefix_window(paged=True)
        assert prefix_window(paged=False)
    with running():
        assert prefix_window(paged=True)


def interleaved_cache(workaround):
    """K and V blocks alternate in a buffer [NB, 2, Hk, BS, D]; whether prefill and both decodes are right."""
    import kunlun_ops

    buffer, query, length = randn(4, 2, 2, 4, 32), randn(1, 2, 32), 11
    table = torch.tensor([[2, 3, 1]], dtype=torch.int32)
    rows = [half[[2, 3, 1]].transpose(1, 2).flatten(0, 1)[:length] for half in buffer.unbind(1)]
    expected = formulas.attention(query, *rows, 32**-0.5)[0]
    caches = buffer.unbind(1)
    if workaround:
        blocks = buffer.flatten(0, 1)
        caches, table = (blocks[:-1], blocks[1:]), table * 2
    lengths, older = torch.tensor([length], dtype=torch.int32), torch.empty(1, 2, 32)
    kunlun_ops.paged_attention(older, query, *caches, table, lengths, lengths.clone())
    results = (
        prefill(query, *caches, [1], [length], block_table=table),
        decode(query[None], *caches, [length], table)[0],
    )
    return [close(result, expected) for result in (*results, older)]


def test_block_addresses_ignore_the_stride_of_a_view():
    with running("paged-view-address"):
        assert interleaved_cache(workaround=False) == [False] * 3
        assert interleaved_cache(workaround=True) == [True] * 3
    with running():
        assert interleaved_cache(workaround=False) == [True] * 3
        assert interleaved_cache(workaround=True) == [True] * 3


def rotate_part(workaround):
    import kunlun_ops

    turns, positions = formulas.frequencies(8), torch.tensor([3, 1, 4])
    query, key, cache = randn(3, 2 * 16), randn(3, 16), formulas.cos_sin_cache(turns, 8)
    expected = formulas.rotated(query.unflatten(-1, (2, 16)), positions, turns, True).flatten(1)
    if workaround == "copy":
        parts = [x.unflatten(-1, (-1, 16))[..., :8].flatten(1).contiguous() for x in (query, key)]
        kunlun_ops.rotary_embedding(positions, *parts, 8, cache, True)
        query.unflatten(-1, (-1, 16))[..., :8] = parts[0].unflatten(-1, (-1, 8))
    elif workaround == "other op":
        query, _ = torch.ops.xspeedgate_ops.flashinfer_rotary_embedding(
            positions=positions,
            rotary_dim=8,
            head_size=16,
            cos_sin_cache=cache,
            is_neox_style=True,
            query=query,
            key=key,
        )
    else:
        kunlun_ops.rotary_embedding(positions, query, key, 16, cache, True)
    return close(query, expected)


def test_rotation_of_part_of_a_head_crashes():
    with running("partial-rotary-crash"):
        with pytest.raises(VendorRefusal, match="partial-rotary-crash"):
            rotate_part(None)
        assert rotate_part("copy")
        assert rotate_part("other op")
    with running():
        assert rotate_part(None)


def expert_activation(tokens, fused):
    import kunlun_ops

    x, weight = randn(tokens, 8), randn(1, 6, 8)
    lod, index = torch.tensor([0, tokens], dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    y, out = torch.empty(tokens, 1, 6), torch.empty(tokens, 3)
    kunlun_ops.moe_fc(
        x=x, weight=weight, sorted_tokens_num_lod=lod, sorted_tokens_idx=index, moe_topk=1, y=y,
        act="SWISH_GLU" if fused else None,
    )  # fmt: skip
    if fused:
        out = y[:, 0, :3]
    else:
        kunlun_ops.swiglu(x=y[:, 0].contiguous(), y=out)
    gate, up = torch.einsum("mk,nk->mn", x, weight[0]).chunk(2, 1)
    return close(out, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("tokens", [1023, 1024, 1025])
def test_fused_activation_is_wrong_from_1024_rows(tokens):
    with running("fused-activation-from-1024-rows"):
        assert expert_activation(tokens, fused=True) == (tokens < 1024)
        assert expert_activation(tokens, fused=False)
    with running():
        assert expert_activation(tokens, fused=True)


def wide_linear(rows, split, dtype=torch.float16):
    x, weight = randn(rows, 16, dtype=dtype), randn(96, 16, dtype=dtype)
    with torch.inference_mode():
        parts = [torch.nn.functional.linear(x, part) for part in weight.split(96 // split)]
    return close(torch.cat(parts, -1), torch.einsum("mk,nk->mn", x.float(), weight.float()), dtype)


def test_wide_linear_of_one_float16_row_is_wrong():
    assert load().fault("linear-wide-output").parameters == {"n": 248320, "k": 5120}
    with emulator.running(faults=["linear-wide-output:n=96:k=16"]):
        assert not wide_linear(1, split=1)
        assert wide_linear(1, split=2)
        assert wide_linear(2, split=1)
        assert wide_linear(1, split=1, dtype=torch.bfloat16)
    with emulator.running():
        assert wide_linear(1, split=1)


def test_exponential_noise_goes_through_the_host():
    def syncs(fill):
        with emulator.launches() as record:
            fill(torch.empty(4))
        return record.syncs

    def workaround(q):
        q.uniform_().clamp_(min=1e-12).log_().neg_()

    with running("exponential-on-host"):
        assert syncs(lambda q: q.exponential_()) == ["aten::exponential_"]
        assert syncs(workaround) == []
    with running():
        assert syncs(lambda q: q.exponential_()) == []


@pytest.mark.parametrize("name", ["reshape_and_cache", "reshape_and_cache_flash"])
def test_slots_may_have_to_be_int32(name):
    def write(dtype):
        import kunlun_ops

        key, cache = randn(1, 1, 8), torch.zeros(2, 2, 1, 4, 8)
        options = {} if name == "reshape_and_cache" else {"BLHD_LAYOUT": False}
        getattr(kunlun_ops, name)(key, key, *cache, torch.tensor([5], dtype=dtype), **options)
        return torch.equal(cache[0, 1, 0, 1], key[0, 0])

    with running("slot-mapping-int32-only"):
        with pytest.raises(VendorRefusal, match="slot-mapping-int32-only"):
            write(torch.int64)
        assert write(torch.int32)
    with running():
        assert write(torch.int64) and write(torch.int32)


def fused_norm(weight_of_kernel, passed):
    """Whether the query's norm comes out as one with `weight_of_kernel`, when `passed` is given."""
    turns, positions, width = formulas.frequencies(8), torch.tensor([2, 5]), 8
    qkv, cache = randn(2, 3 * width), formulas.cos_sin_cache(turns, 8)
    query = torch.ops.xspeedgate_ops.split_norm_rope_neox(
        qkv=qkv, q_weights=passed, k_weights=passed, positions=positions, cos_sin_cache=cache, q_size=width,
        kv_size=width, num_q_heads=1, num_kv_heads=1, head_dim=width, rotary_dim=width, attn_output_gate=False,
    )[0]  # fmt: skip
    heads = qkv[:, None, :width]
    return close(query, formulas.rotated(formulas.rms(heads, 1e-6) * weight_of_kernel, positions, turns, True)[:, 0])


def test_fused_norm_may_not_add_one_to_the_weight():
    weight = randn(8)
    with running("split-norm-rope-plain-weight"):
        assert not fused_norm(1 + weight, passed=weight)
        assert fused_norm(1 + weight, passed=1 + weight)
    with running():
        assert fused_norm(1 + weight, passed=weight)


def default_layout(**given):
    """Whether a cache of the layout [NB, BS, Hk, D] is taken, with its six rows of one block in place."""
    import kunlun_ops

    key, cache = randn(2, 3, 8), torch.zeros(2, 2, 4, 3, 8)
    try:
        kunlun_ops.reshape_and_cache_flash(key, key, *cache, torch.tensor([0, 5]), **given)
    except VendorRefusal:
        return False
    return torch.equal(cache[0, 1, 1], key[1])


def test_default_of_the_layout_flag_may_be_the_other_one():
    with running("blhd-layout-default-false"):
        assert not default_layout()
        assert default_layout(BLHD_LAYOUT=True)
    with running():
        assert default_layout()


def test_window_keyword_may_be_absent():
    with running("max-window-size-absent"):
        with pytest.raises(TypeError, match="max_window_size"):
            windowed(4, passed=4)
        assert close(*decode_batch(3, 1))
        # One query of each request through the other callable.
        query, key, value = randn(1, 2, 32), randn(9, 2, 32), randn(9, 2, 32)
        out = prefill(query, key, value, [1], [9], swa_left=4, swa_right=0)
        assert close(out, formulas.attention(query, key, value, 32**-0.5, window=4)[0])
    with running():
        assert windowed(4, passed=4) == (True, True)


@pytest.mark.parametrize(
    ("fault", "generation"),
    [
        ("masked-input-absent", "torch29"),
        ("moe-pre-small-absent", "torch29"),
        ("weak-ref-tensor-absent", "torch29"),
        ("inplace-exponential-absent", "torch25"),
    ],
)
def test_absent_callables(fault, generation):
    names = [name.partition(".")[2] for name in load().fault(fault).ops]
    with running(fault, generation=generation):
        assert not [name for name in names if hasattr(torch.ops.xspeedgate_ops, name)]
    with running(generation=generation):
        assert all(hasattr(torch.ops.xspeedgate_ops, name) for name in names)


def test_a_scale_of_zero_is_the_default_scale():
    with running():
        cache, query = randn(2, 1, 1, 4, 32), randn(1, 1, 1, 32)
        table = torch.tensor([[0]], dtype=torch.int32)
        assert torch.equal(
            decode(query, *cache, [3], table, scale=0.0), decode(query, *cache, [3], table, scale=1 / math.sqrt(32))
        )
        flat = cache[1, 0, 0, :3].mean(0)
        assert relative_l2(decode(query, *cache, [3], table, scale=1e-9)[0, 0, 0], flat) < 1e-5


TESTED = {
    "decode-batch-limit", "decode-float32-block-64", "value-slots-several-kv-heads", "sliding-window-off-by-one",
    "prefix-path-ignores-window-and-sinks", "paged-view-address", "partial-rotary-crash",
    "fused-activation-from-1024-rows", "linear-wide-output", "exponential-on-host", "slot-mapping-int32-only",
    "split-norm-rope-plain-weight", "blhd-layout-default-false", "max-window-size-absent", "masked-input-absent",
    "moe-pre-small-absent", "inplace-exponential-absent", "weak-ref-tensor-absent",
}  # fmt: skip
# The wrong way, the right way, and that they differ: tests of the ops themselves, by the same words.
ALWAYS = {
    "pad-rows-unwritten", "alpha-on-top-of-head-size", "max-instead-of-scale", "decode-scale-zero-is-default",
}  # fmt: skip


def test_every_fault_of_the_table_has_a_test_here():
    faults = load().faults
    assert {name for name, fault in faults.items() if not fault.always} == TESTED
    assert {name for name, fault in faults.items() if fault.always} == ALWAYS


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["decode-batch-limits"], "no fault 'decode-batch-limits'. Known: alpha"),
        (["decode-batch-limit:size=3"], "'size=3' is no parameter of decode-batch-limit; accepted: batch=NUMBER"),
        (["decode-batch-limit:batch=many"], "'batch=many'"),
        (["partial-rotary-crash:batch=3"], "accepted: none"),
        (["inplace-exponential-absent"], "does not occur in torch29, only in torch25"),
    ],
)
def test_wrong_fault_names_are_errors(faults, message):
    with pytest.raises(EmulatorSettingError, match=message):
        Settings.of(faults=faults)
