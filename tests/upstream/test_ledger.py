"""The patch ledger: it refuses what is not there, and each entry's test fails once the entry can be deleted."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest
import torch

from vllm_kunlun.upstream import ledger, patches


def test_missing_target_is_refused() -> None:
    patch = replace(patches.EMPTY_CACHE, target="torch:accelerator.no_such_function")
    with pytest.raises(ledger.PatchTargetMissing, match=r"no_such_function is missing in torch"):
        ledger.apply(patch)


def test_patch_for_another_version_is_not_applied() -> None:
    patch = replace(patches.EMPTY_CACHE, target="torch:accelerator.current_device_index", versions="<0.1")
    before = torch.accelerator.current_device_index
    ledger.apply(patch)
    assert torch.accelerator.current_device_index is before


@pytest.mark.parametrize("patch", patches.HOST_PATCHES, ids=lambda patch: patch.target)
def test_every_entry_names_a_test_that_exists(patch: ledger.Patch) -> None:
    file, _, name = patch.test.partition("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert callable(getattr(module, name))
    assert patch.reason


@pytest.mark.parametrize("patch", [patches.EMPTY_CACHE, patches.SYNCHRONIZE], ids=lambda patch: patch.target)
def test_accelerator_calls_still_fail_without_accelerator(patch: ledger.Patch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(RuntimeError, match="accelerator"):
        ledger.original(patch)()


def test_slot_mapping_kernel_still_needs_triton() -> None:
    from vllm.v1.worker import block_table

    assert "@triton.jit" in inspect.getsource(block_table)
    assert hasattr(block_table, "_compute_slot_mapping_kernel")
