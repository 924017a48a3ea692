"""Ledger entries of the targets p800 and emulated."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch

from vllm_kunlun import emulator
from vllm_kunlun.upstream import extension, ledger, patches


def test_vllm_still_looks_for_active_triton_drivers() -> None:
    from vllm.triton_utils import importing

    source = inspect.getsource(importing)
    assert "from triton.backends import backends" in source
    assert "driver.is_active()" in source


def test_hidden_triton_drivers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A triton whose driver claims the card, as NVIDIA's does wherever torch.cuda is available."""
    backends = ModuleType("triton.backends")
    backends.backends = {"nvidia": object()}
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.backends", backends)
    monkeypatch.setattr(patches, "installed_version", lambda name: "3.5.0")
    monkeypatch.setattr(ledger, "version", lambda name: "3.5.0")
    monkeypatch.setattr(ledger, "_APPLIED", {})
    patches.hide_triton_drivers()
    assert backends.backends == {}


def test_xgrammar_still_wants_triton_on_cuda() -> None:
    from xgrammar import matcher

    source = inspect.getsource(matcher)
    assert "triton" in source
    assert '"cuda"' in source


@pytest.mark.parametrize("vocab", [64, 77])
def test_tokens_are_masked_as_xgrammar_masks_them(vocab: int) -> None:
    """Rows without a grammar have all bits set."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    bitmask[1] = -1
    expected = logits.clone()
    ledger.original(patches.TOKEN_BITMASK)(expected, bitmask, indices=[0, 2])
    patches.TOKEN_BITMASK.make(None)(logits, bitmask, indices=torch.tensor([0, 2]))
    assert torch.equal(logits, expected)
    assert logits[0].isinf().any()


def test_ops_of_vllms_extension_are_there() -> None:
    with emulator.running():
        extension.provide_extension_ops("CPU")
        x = torch.ones(4, 5)
        alias = torch.ops._C.weak_ref_tensor(x)
        assert alias.data_ptr() == x.data_ptr()
        logits, mask = torch.tensor([[2.0, -2.0, 4.0]]), torch.tensor([[True, True, False]])
        torch.ops._C.apply_repetition_penalties_(logits, mask, torch.zeros_like(mask), torch.tensor([2.0]))
    assert logits.tolist() == [[1.0, -4.0, 4.0]]


def test_a_function_that_torch_lacks_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap of torch 2.9; the entry can go once every supported torch has the function."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1, 2))
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    patches.fill_torch_gaps()
    assert torch.accelerator.get_memory_info("cuda:0") == (1, 2)


def test_a_function_that_torch_has_is_left_alone() -> None:
    before = torch.accelerator.get_memory_info
    patches.fill_torch_gaps()
    assert torch.accelerator.get_memory_info is before
