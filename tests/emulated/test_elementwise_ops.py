"""Emulated norms, activations and rotations against formulas that share nothing with them."""

import pytest
import torch
from torch.nn import functional as F

from tests.emulated import formulas
from tests.emulated.formulas import DTYPES, close

SHAPES = [(1, 576), (7, 33), (3, 5, 40), (130, 17)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm(stack, randn, dtype, shape):
    import kunlun_ops

    x, weight, out = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype), torch.empty(shape, dtype=dtype)
    kunlun_ops.rmsnorm(x, weight, out, 1e-6)
    assert close(out, formulas.rms(x, 1e-6) * weight.float(), dtype)


def test_rmsnorm_takes_float32_weights_and_writes_in_place(stack, randn):
    import kunlun_ops

    x, weight = randn(5, 24, dtype=torch.float16), randn(24)
    expected = formulas.rms(x, 1e-5) * weight
    kunlun_ops.rmsnorm(x, weight, x)
    assert close(x, expected, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "offset"), [("add_rmsnorm", 0.0), ("gemma_add_rmsnorm", 1.0)])
def test_norm_of_a_sum_gives_the_sum_too(stack, randn, dtype, name, offset):
    import kunlun_ops

    x, y, weight = randn(9, 48, dtype=dtype), randn(9, 48, dtype=dtype), randn(48, dtype=dtype)
    out, total = torch.empty_like(x), torch.empty_like(x)
    getattr(kunlun_ops, name)(x, y, weight=weight, eps=1e-5, output=out, residual_output=total)
    assert close(total, x.float() + y.float(), dtype)
    assert close(out, formulas.rms(total, 1e-5) * (weight.float() + offset), dtype)


def test_norm_of_a_sum_in_place(stack, randn):
    import kunlun_ops

    x, residual, weight = randn(4, 16), randn(4, 16), randn(16)
    total = x + residual
    kunlun_ops.add_rmsnorm(x, residual, weight=weight, eps=1e-5, output=x, residual_output=residual)
    assert close(residual, total)
    assert close(x, formulas.rms(total, 1e-5) * weight)


def test_gemma_rmsnorm_adds_one_to_the_weight(stack, randn):
    import kunlun_ops

    x, weight, out = randn(6, 20), randn(20), torch.empty(6, 20)
    kunlun_ops.gemma_rmsnorm(x, weight, out, 1e-6)
    assert close(out, formulas.rms(x, 1e-6) * (1 + weight))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("group_size", [None, 8])
def test_gated_norm(stack, randn, before, root, group_size):
    import kunlun_ops

    x, z, weight, out = randn(5, 24), randn(5, 24), randn(24), torch.empty(5, 24)
    kunlun_ops.rms_norm_gated(x, out, z, weight, 1e-5, group_size, before, root)
    gate = z * torch.sigmoid(z)
    rows = (x if before else x * gate).reshape(-1, group_size or 24)
    normed = formulas.rms(rows, 1e-05) if root else F.layer_norm(rows, (rows.shape[1],), eps=1e-05)
    expected = normed.reshape(5, 24) * weight * (gate if before else 1)
    assert close(out, expected)


def test_l2norm(stack, randn):
    import kunlun_ops

    x, out = randn(3, 4, 12), torch.empty(3, 4, 12)
    kunlun_ops.l2norm(x, out)
    expected = torch.stack([row / torch.sqrt(row @ row + 1e-6) for row in x.reshape(-1, 12)]).reshape(x.shape)
    assert close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 37])
def test_swiglu_under_both_names(stack, randn, dtype, rows):
    import kunlun_ops

    x = randn(rows, 2 * 27, dtype=dtype)
    gate, up = x[:, :27].float(), x[:, 27:].float()
    expected = gate / (1 + torch.exp(-gate)) * up
    for run in (lambda y: kunlun_ops.swiglu(x=x, y=y), lambda y: kunlun_ops.silu_and_mul(x, axis=-1, turn=True, out=y)):
        out = torch.empty(rows, 27, dtype=dtype)
        run(out)
        assert close(out, expected, dtype)


def test_gelus(stack, randn):
    import kunlun_ops

    x = randn(11, 13)
    quick, exact = torch.empty_like(x), torch.empty_like(x)
    kunlun_ops.quick_gelu(x, quick)
    kunlun_ops.gelu(x, exact)
    assert close(quick, x / (1 + torch.exp(-1.702 * x)))
    assert close(exact, x * 0.5 * (1 + torch.erf(x / 2**0.5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_embedding_in_place(stack, randn, dtype, is_neox, rotary_dim):
    import kunlun_ops

    tokens, head_size = 5, 16
    positions = torch.tensor([0, 7, 3, 63, 1])
    query, key = randn(tokens, 4 * head_size, dtype=dtype), randn(tokens, 2 * head_size, dtype=dtype)
    turns = formulas.frequencies(rotary_dim)
    expected = [
        formulas.rotated(x.unflatten(-1, (-1, head_size)), positions, turns, is_neox).flatten(-2) for x in (query, key)
    ]
    kunlun_ops.rotary_embedding(
        positions, query, key, head_size, formulas.cos_sin_cache(turns, 64, dtype), is_neox
    )  # fmt: skip
    # The table is rounded to the dtype, so the angle is off by as much as the dtype resolves.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert formulas.relative_l2(query, expected[0]) < tolerance
    assert formulas.relative_l2(key, expected[1]) < tolerance


@pytest.mark.parametrize("heads_apart", [True, False])
def test_rotation_of_part_of_a_head_into_new_tensors(stack, randn, heads_apart):
    tokens, head_size, turns = 6, 20, formulas.frequencies(12)
    positions = torch.arange(tokens).flip(0)
    query, key = randn(tokens, 3, head_size), randn(tokens, 1, head_size)
    given = (query, key) if heads_apart else (query.flatten(1), key.flatten(1))
    rotated = torch.ops.xspeedgate_ops.flashinfer_rotary_embedding(
        positions=positions, rotary_dim=12, head_size=head_size, cos_sin_cache=formulas.cos_sin_cache(turns, 10),
        is_neox_style=False, query=given[0], key=given[1], offsets=None,
    )  # fmt: skip
    for result, before in zip(rotated, (query, key), strict=True):
        expected = formulas.rotated(before, positions, turns, False)
        assert formulas.relative_l2(result.reshape(expected.shape), expected) < 2e-6


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_with_three_position_rows(stack, randn, interleaved):
    turns, sections = formulas.frequencies(16), (4, 2, 2)
    positions = torch.tensor([[3, 9, 1], [5, 0, 2], [7, 8, 4]], dtype=torch.int32)
    query, key = randn(3, 2 * 16), randn(3, 16)
    out, _ = torch.ops.xspeedgate_ops.mrotary_embedding_fwd_v0(
        query, key, positions, formulas.cos_sin_cache(turns, 12), interleaved, True, 16, 16, *sections
    )
    # Which row each of the 8 frequencies follows, written out.
    rows = [0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    for token in range(3):
        for head in range(2):
            numbers = torch.complex(
                query[token, head * 16 : head * 16 + 8], query[token, head * 16 + 8 : head * 16 + 16]
            )
            angle = torch.stack([positions[row, token] * turns[i] for i, row in enumerate(rows)])
            numbers = numbers * torch.polar(torch.ones(8), angle)
            expected = torch.cat((numbers.real, numbers.imag))
            assert formulas.relative_l2(out[token, head * 16 : head * 16 + 16], expected) < 2e-6


def qkv_case(randn, dtype=torch.float32, gated=False):
    heads, kv_heads, width, tokens = 4, 2, 8, 5
    turns, positions = formulas.frequencies(width), torch.tensor([2, 0, 11, 5, 1])
    query, key, value = (randn(tokens, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    gate = randn(tokens, heads, width, dtype=dtype)
    first = torch.stack((query, gate), 2) if gated else query
    qkv = torch.cat([part.flatten(1) for part in (first, key, value)], -1)
    return heads, kv_heads, width, turns, positions, query, key, value, gate, qkv


def normed_and_rotated(x, weight, positions, turns):
    return formulas.rotated(formulas.rms(x, 1e-6) * weight.float(), positions, turns, True).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_split_norm_rotation_into_given_tensors(stack, randn, dtype):
    import kunlun_ops

    heads, kv_heads, width, turns, positions, query, key, value, _, qkv = qkv_case(randn, dtype)
    q_weight, k_weight = randn(width), randn(width)
    outs = [torch.empty(5, n * width, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    kunlun_ops.split_norm_rope_neox(
        *outs,
        qkv,
        formulas.cos_sin_cache(turns, 16),
        q_weight,
        k_weight,
        positions,
        5,
        16,
        heads,
        kv_heads,
        width,
        width,
    )
    assert close(outs[0], normed_and_rotated(query, q_weight, positions, turns), dtype)
    assert close(outs[1], normed_and_rotated(key, k_weight, positions, turns), dtype)
    assert torch.equal(outs[2], value.flatten(1))


@pytest.mark.parametrize("gated", [True, False])
def test_fused_split_norm_rotation_with_output_gate(stack, randn, gated):
    heads, kv_heads, width, turns, positions, query, key, value, gate, qkv = qkv_case(randn, gated=gated)
    q_weight, k_weight = randn(width), randn(width)
    results = torch.ops.xspeedgate_ops.split_norm_rope_neox(
        qkv=qkv, q_weights=q_weight, k_weights=k_weight, positions=positions,
        cos_sin_cache=formulas.cos_sin_cache(turns, 16), q_size=heads * width, kv_size=kv_heads * width,
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=width, rotary_dim=width, attn_output_gate=gated,
    )  # fmt: skip
    assert close(results[0], normed_and_rotated(query, 1 + q_weight, positions, turns))
    assert close(results[1], normed_and_rotated(key, 1 + k_weight, positions, turns))
    assert torch.equal(results[2], value.flatten(1))
    assert torch.equal(results[3], gate.flatten(1) if gated else torch.empty(5, 0))
