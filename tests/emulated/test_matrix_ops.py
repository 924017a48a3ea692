"""Emulated matrix products and quantisation."""

import pytest
import torch

from tests.emulated.formulas import DTYPES, close, relative_l2


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_rows_and_their_largest_values(stack, randn, dtype):
    import kunlun_ops

    x = randn(6, 33, dtype=dtype)
    x[2] = 0
    quantised, largest = torch.empty(6, 33, dtype=torch.int8), torch.empty(6, 1)
    kunlun_ops.quant2d(x, quantised, largest, force_sdnn=True)
    for row in range(6):
        most = float(x[row].float().abs().max())
        assert float(largest[row]) == most
        back = quantised[row].float() * most / 127
        assert float((back - x[row].float()).abs().max()) <= most / 127 / 2 * 1.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_floating_product(stack, randn, dtype, transposed):
    import kunlun_ops

    x, weight, bias, out = randn(5, 19, dtype=dtype), randn(7, 19, dtype=dtype), randn(7), randn(5, 7, dtype=dtype)
    expected = 0.5 * torch.einsum("mk,nk->mn", x.float(), weight.float()) + 2.0 * out.float() + bias
    stored = weight if transposed else weight.t().contiguous()
    kunlun_ops.matmul(x=x, w=stored, out=out, w_trans=transposed, alpha=0.5, beta=2.0, bias=bias)
    assert close(out, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_product_with_largest_values(stack, randn, dtype):
    import kunlun_ops

    x, weight = randn(9, 64), randn(11, 64)
    rows, columns = x.abs().amax(1, keepdim=True), weight.abs().amax(1, keepdim=True)
    x_q, w_q = (torch.round(t / m * 127).to(torch.int8) for t, m in ((x, rows), (weight, columns)))
    out = torch.empty(9, 11, dtype=dtype)
    kunlun_ops.matmul(x=x_q, w=w_q, out=out, x_pc_max=rows, w_pc_max=columns.flatten())
    expected = (x_q.float() * rows / 127) @ (w_q.float() * columns / 127).T
    assert close(out, expected, dtype)
    assert relative_l2(out, x @ weight.T) < 0.02


def test_scale_instead_of_largest_value_is_off_by_a_constant_factor(stack, randn):
    import kunlun_ops

    x, weight = randn(4, 32), randn(8, 32)
    scales = [t.abs().amax(1) / 127 for t in (x, weight)]
    x_q, w_q = (torch.round(t / s[:, None]).to(torch.int8) for t, s in zip((x, weight), scales, strict=True))
    right, wrong = torch.empty(4, 8, dtype=torch.float32), torch.empty(4, 8, dtype=torch.float32)
    kunlun_ops.matmul(x=x_q, w=w_q, out=right, x_pc_max=scales[0] * 127, w_pc_max=scales[1] * 127)
    kunlun_ops.matmul(x=x_q, w=w_q, out=wrong, x_pc_max=scales[0], w_pc_max=scales[1])
    assert relative_l2(right, x @ weight.T) < 0.02
    assert relative_l2(wrong, x @ weight.T) > 0.9
    assert float(torch.cosine_similarity(wrong.flatten(), right.flatten(), 0)) > 0.9999


def test_int8_products_with_true_scales(stack, randn):
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((5, 24), (6, 24)))
    scale_a, scale_b, bias = randn(5, 1).abs(), randn(1, 6).abs(), randn(6, dtype=torch.float16)
    out = torch.empty(5, 6, dtype=torch.float16)
    torch.ops.xspeedgate_ops.cutlass_scaled_mm(out, a, b.t(), scale_a * 1e-3, scale_b * 1e-2, bias)
    product = (a.long() @ b.long().T).float()
    assert close(out, scale_a * 1e-3 * scale_b * 1e-2 * product + bias.float(), torch.float16)


def test_asymmetric_rows_keep_their_values(stack, randn):
    x, weight = randn(5, 40) + 3, randn(6, 40)
    x_q, scale, zero = torch.empty(5, 40, dtype=torch.int8), torch.empty(5, 1), torch.empty(5, 1, dtype=torch.int32)
    torch.ops.xspeedgate_ops.dynamic_scaled_int8_quant(x_q, x, scale, zero)
    assert relative_l2((x_q.float() - zero) * scale, x) < 0.01
    w_scale = weight.abs().amax(1, keepdim=True) / 127
    w_q = torch.round(weight / w_scale).to(torch.int8)
    column_sums = w_q.int().sum(1).to(torch.int32)
    out = torch.empty(5, 6, dtype=torch.bfloat16)
    torch.ops.xspeedgate_ops.cutlass_scaled_mm_azp(out, x_q, w_q.t(), scale, w_scale.T, column_sums, zero, None)
    assert relative_l2(out, x @ weight.T) < 0.03


def test_symmetric_and_static_quantisation(stack, randn):
    x = randn(5, 24)
    x_q, scale = torch.empty(5, 24, dtype=torch.int8), torch.empty(5, 1)
    torch.ops.xspeedgate_ops.dynamic_scaled_int8_quant(x_q, x, scale, None)
    assert torch.allclose(scale[:, 0], x.abs().amax(1) / 127)
    assert relative_l2(x_q.float() * scale, x) < 0.01
    torch.ops.xspeedgate_ops.static_scaled_int8_quant(x_q, x, torch.tensor(0.02), None)
    assert relative_l2(x_q.float() * 0.02, x.clamp(-128 * 0.02, 127 * 0.02)) < 0.01


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("activation", [None, "SWISH_GLU"])
def test_expert_product(stack, randn, quantised, activation):
    import kunlun_ops

    tokens, topk, experts, outputs, inputs = 7, 2, 3, 8, 16
    counts = [5, 0, 9]
    lod = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    x, weight = randn(tokens * topk, inputs), randn(experts, outputs, inputs)
    options = {}
    if quantised:
        x_max, w_max = x.abs().amax(1, keepdim=True), weight.abs().amax(2)
        options = {"x_perchannel_max": x_max, "w_perchannel_max": w_max}
        x_q, w_q = (
            torch.round(x / x_max * 127).to(torch.int8),
            torch.round(weight / w_max[..., None] * 127).to(torch.int8),
        )
        x, weight = x_q.float() * x_max / 127, w_q.float() * w_max[..., None] / 127
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = torch.stack([weight[expert] @ row for expert, row in zip(owner, x, strict=True)])
    y = torch.empty(tokens, topk, outputs)
    kunlun_ops.moe_fc(
        x=x_q if quantised else x, weight=w_q if quantised else weight, sorted_tokens_num_lod=lod,
        sorted_tokens_idx=torch.arange(14, dtype=torch.int32), moe_topk=topk, y=y, act=activation, **options,
    )  # fmt: skip
    if activation:
        gate, up = expected.chunk(2, 1)
        assert close(y.flatten(0, 1)[:, : outputs // 2], gate * torch.sigmoid(gate) * up)
    else:
        assert close(y.flatten(0, 1), expected)
