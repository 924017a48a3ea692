"""The patch ledger: it refuses what is not there, and each entry's test fails once the entry can be deleted."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest
import torch
import vllm.envs

import vllm_kunlun
from vllm_kunlun.platforms.envs import VARIABLES
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


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.target)
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


def test_vllm_still_warns_of_variables_that_plugins_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "environment_variables", ledger.original(patches.KNOWN_VARIABLES))
    monkeypatch.setenv("VLLM_KUNLUN_TARGET", "host")
    with pytest.raises(ValueError, match="VLLM_KUNLUN_TARGET"):
        vllm.envs.validate_environ(hard_fail=True)


def test_vllm_knows_every_variable_of_an_inactive_plugin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kunlun, "_is_platform_ours", lambda: False)
    vllm_kunlun.register_model()
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "1")
    vllm.envs.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_KUNLUN_TARGTE", "host")
    with pytest.raises(ValueError, match="VLLM_KUNLUN_TARGTE"):
        vllm.envs.validate_environ(hard_fail=True)
