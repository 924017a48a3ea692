"""The launch counter, and what a dense layer's decode costs."""

import pytest
import torch
from torch.nn import functional as F

from vllm_kunlun import emulator


@pytest.fixture
def device():
    with emulator.running() as session:
        yield session


def test_vendor_torch_and_free_operators_are_told_apart(device):
    import kunlun_ops

    x, out, weight = torch.randn(3, 8), torch.empty(3, 8), torch.ones(8)
    with torch.inference_mode(), emulator.launches() as record:
        kunlun_ops.rmsnorm(x, weight, out)
        y = torch.empty_like(out).copy_(out)
        y.view(-1)[:4].t()
        F.linear(y, weight.reshape(1, 8))
        y.t().contiguous()
        y.contiguous()
    assert record.vendor == ["kunlun_ops.rmsnorm", "torch.nn.functional.linear"]
    assert record.torch == ["aten::copy_", "aten::clone"]
    assert record.names == ["kunlun_ops.rmsnorm", "aten::copy_", "torch.nn.functional.linear", "aten::clone"]
    assert record.syncs == []


@pytest.mark.parametrize(
    ("step", "sync"),
    [
        (lambda x: x.sum().item(), "Tensor.item"),
        (lambda x: float(x[0]), "Tensor.__float__"),
        (lambda x: x.cpu(), "Tensor.cpu"),
        (lambda x: x.to("cpu"), "Tensor.to"),
        (lambda x: x.to(device=torch.device("cpu")), "Tensor.to"),
        (lambda x: x.tolist(), "Tensor.tolist"),
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x.masked_select(x > 0), "aten::masked_select"),
        (lambda x: torch.searchsorted(x, x), "aten::searchsorted"),
        (lambda x: x.unique_consecutive(), "aten::unique_consecutive"),
        (lambda x: x.__setitem__(x > 0, 1.0), "index with a boolean mask"),
        (lambda x: x[x > 0], "index with a boolean mask"),
    ],
)
def test_host_synchronisations_are_seen_once(device, step, sync):
    x = torch.tensor([0.5, 1.0, 2.0])
    with emulator.launches() as record:
        step(x)
    assert record.syncs == [sync]


def test_conversions_that_stay_on_the_device_are_no_synchronisation(device):
    x = torch.ones(3)
    with emulator.launches() as record:
        x.to(torch.float16)
        x[torch.tensor([0, 2])]
        x[1:] = 2
    assert record.syncs == []


def test_the_arithmetic_of_the_emulator_is_nobodys_launch(device):
    import kunlun_ops

    with emulator.launches() as record:
        kunlun_ops.swiglu(x=torch.ones(2, 8), y=torch.empty(2, 4))
    assert record.vendor == ["kunlun_ops.swiglu"]
    assert "aten::silu" not in record.torch


def test_launches_need_an_emulator():
    with pytest.raises(emulator.EmulatorStateError, match="not installed"):
        emulator.launches()


class DenseLayer:
    """A Qwen3-shaped layer over the vendor's callables: 4 heads of 32, 2 KV heads, blocks of 16."""

    tokens, hidden, heads, kv_heads, width, inner = 3, 64, 4, 2, 32, 96

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        q, kv = self.heads * self.width, self.kv_heads * self.width

        def weight(*shape):
            return torch.randn(*shape, generator=generator).half() / 8

        self.qkv, self.o = weight(q + 2 * kv, self.hidden), weight(self.hidden, q)
        self.gate_up, self.down = weight(2 * self.inner, self.hidden), weight(self.hidden, self.inner)
        self.norms, self.head_norm = torch.ones(2, self.hidden).half(), torch.ones(self.width)
        self.rope = torch.randn(64, self.width, generator=generator).half()
        self.cache = torch.zeros(2, 8, self.kv_heads, 16, self.width).half()
        self.table = torch.arange(6, dtype=torch.int32).reshape(3, 2)
        self.lengths = torch.tensor([5, 17, 1], dtype=torch.int32)
        self.slots = torch.tensor([4, 48, 64])
        self.positions = torch.tensor([4, 16, 0])
        self.outs = [torch.empty(self.tokens, n).half() for n in (q, kv, kv, q, self.inner)]

    def decode(self, x, residual):
        import kunlun_ops

        query, key, value, attended, activated = self.outs
        kunlun_ops.add_rmsnorm(x, residual, weight=self.norms[0], output=x, residual_output=residual)
        kunlun_ops.split_norm_rope_neox(
            query, key, value, F.linear(x, self.qkv), self.rope, self.head_norm, self.head_norm, self.positions,
            self.tokens, 64, self.heads, self.kv_heads, self.width, self.width,
        )  # fmt: skip
        per_head = (self.tokens, -1, self.width)
        kunlun_ops.reshape_and_cache(key.view(per_head), value.view(per_head), *self.cache, self.slots)
        kunlun_ops.speculative_attention(
            out=attended.view(per_head), q=query.view(per_head).unsqueeze(0), k_cache=self.cache[0],
            v_cache=self.cache[1], context_lens_cpu=self.lengths, context_lens_xpu=self.lengths.clone(),
            batch_num=self.tokens, qlen=1, max_context_len=64, head_num=self.heads, head_dim=self.width,
            kv_head_num=self.kv_heads, block_size=16, max_num_blocks_per_seq=2, block_tables=self.table,
        )  # fmt: skip
        x = F.linear(attended, self.o)
        kunlun_ops.add_rmsnorm(x, residual, weight=self.norms[1], output=x, residual_output=residual)
        kunlun_ops.swiglu(x=F.linear(x, self.gate_up), y=activated)
        return F.linear(activated, self.down), residual


def test_decode_of_a_dense_layer_takes_ten_launches_and_no_synchronisation(device):
    layer, x, residual = DenseLayer(), torch.randn(3, 64).half(), torch.randn(3, 64).half()
    with torch.inference_mode(), emulator.launches() as record:
        out, _ = layer.decode(x, residual)
    assert not out.isnan().any()
    linear = "torch.nn.functional.linear"
    assert record.vendor == [
        "kunlun_ops.add_rmsnorm", linear, "kunlun_ops.split_norm_rope_neox", "kunlun_ops.reshape_and_cache",
        "kunlun_ops.speculative_attention", linear, "kunlun_ops.add_rmsnorm", linear, "kunlun_ops.swiglu", linear,
    ]  # fmt: skip
    # The copy of the lengths above stands for the device's own, which a runner keeps.
    assert record.torch == ["aten::clone"]
    assert record.syncs == []
