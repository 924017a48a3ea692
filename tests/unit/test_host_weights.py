"""Weights in one block: the model computes the same, from the same tensors, elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from vllm_kunlun.targets.host import weights


class Tied(nn.Module):
    """A table that is also the head and has a part of its own name, a transposed weight, other types, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.part = nn.Parameter(self.embedding.weight.data[2:5], requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(7, 6).T, requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.register_buffer("counts", torch.arange(9, dtype=torch.int64))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def test_values_shapes_and_strides_stay() -> None:
    model = Tied()
    before = {name: (t.detach().clone(), t.stride()) for name, t in tensors(model).items()}
    weights.gather(model)
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor.stride() == before[name][1] and tensor.dtype == before[name][0].dtype, name


def test_everything_lies_in_one_block_once() -> None:
    model = Tied()
    size = weights.gather(model)
    blocks = {t.untyped_storage().data_ptr() for t in tensors(model).values() if t.numel()}
    assert len(blocks) == 1
    table, transposed, narrow, counts = 11 * 6 * 4, 7 * 6 * 4, 3 * 5 * 2, 9 * 8
    assert size == sum(-(-n // 64) * 64 for n in (table, transposed, narrow, counts))


def test_shared_memory_stays_shared_and_writable() -> None:
    model = Tied()
    weights.gather(model)
    with torch.no_grad():
        model.embedding.weight[3].fill_(7.0)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.part[1], torch.full((6,), 7.0))
    assert torch.equal(model.head(torch.ones(6))[3], torch.tensor(42.0))


def test_a_model_without_weights_needs_no_block() -> None:
    assert weights.gather(nn.Identity()) == 0
