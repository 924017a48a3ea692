"""Ledger entries of the targets p800 and emulated."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest
import torch

from vllm_kunlun.upstream import ledger, patches


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
