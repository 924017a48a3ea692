"""What is installed, compared with the contract: absent callables and keywords, libraries that do not load."""

import sys
from types import ModuleType

import pytest
import torch

from vllm_kunlun import emulator
from vllm_kunlun.targets.p800.contract import Generation, UnknownVendorName
from vllm_kunlun.targets.p800.probe import MissingVendorOps, probe

DENSE_DECODE = [
    "kunlun_ops.add_rmsnorm", "kunlun_ops.split_norm_rope_neox", "kunlun_ops.reshape_and_cache",
    "kunlun_ops.speculative_attention", "kunlun_ops.swiglu", "torch.nn.functional.linear",
]  # fmt: skip


def differences(stack):
    return {(d.op, d.kind) for d in stack.differences() if d.kind != "not checked"}


@pytest.mark.parametrize("generation", list(Generation))
def test_complete_stack_has_no_difference(generation):
    with emulator.running(generation.value, device=False):
        stack = probe(generation)
        assert stack.broken == {}
        assert differences(stack) == set()
        stack.require(DENSE_DECODE)


def test_all_missing_ops_are_listed_at_once_with_their_wheels():
    missing = ["kunlun_ops.swiglu", "xspeedgate_ops.moe_pre_small"]
    with emulator.running(missing=missing, device=False):
        stack = probe(Generation.TORCH29)
        assert differences(stack) == {(name, "absent") for name in missing}
        with pytest.raises(MissingVendorOps) as caught:
            stack.require([*DENSE_DECODE, *missing, "kunlun_ops.moe_fc_v3"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("3 vendor ops that this configuration needs are not installed")
    assert "kunlun_ops.swiglu: install kunlun_ops newer than 0.1.58" in lines[1]
    assert "install xspeedgate_ops 1.5.0 or newer (not every build of it); without it: kunlun_ops.gen" in lines[2]
    assert "the torch29 stack does not have it, only torch25" in lines[3]


def test_missing_op_is_missing_for_callers_too():
    with emulator.running(missing=["swiglu", "weak_ref_tensor"], device=False):
        import kunlun_ops

        assert not hasattr(kunlun_ops, "swiglu")
        assert not hasattr(torch.ops.xspeedgate_ops, "weak_ref_tensor")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rms_norm", "'rms_norm' is not in the vendor contract"),
        ("split_norm_rope_neox", "stands for kunlun_ops.split_norm_rope_neox and xspeedgate_ops.split_norm_rope_neox"),
    ],
)
def test_missing_names_must_be_known(name, message):
    with pytest.raises(emulator.EmulatorSettingError, match=message):
        emulator.Settings.of(missing=[name])


def test_without_libraries_the_error_says_so():
    stack = probe(Generation.TORCH29)
    assert set(stack.broken) == {"kunlun_ops", "xspeedgate_ops"}
    with pytest.raises(MissingVendorOps, match="kunlun_ops cannot be imported: ModuleNotFoundError"):
        stack.function("kunlun_ops.swiglu")


def test_absent_keyword_is_found():
    with emulator.running(faults=["max-window-size-absent"], device=False):
        stack = probe(Generation.TORCH29)
        assert differences(stack) == {("kunlun_ops.speculative_attention", "absent keyword")}
        assert stack.keyword("kunlun_ops.speculative_attention", "max_window_size") is None
        assert stack.keyword("kunlun_ops.speculative_attention", "sink") == "sink"


@pytest.mark.parametrize(("generation", "keyword"), [("torch25", "block_static"), ("torch29", "block_statistic")])
def test_renamed_keyword_by_generation(generation, keyword):
    with emulator.running(generation, device=False):
        stack = probe(Generation(generation))
        assert stack.keyword("kunlun_ops.moe_sigmoid_group_topk_norm", "block_static") == keyword


def test_keyword_of_another_generation_is_used_where_it_is_installed(monkeypatch):
    library = ModuleType("kunlun_ops")

    def moe_sigmoid_group_topk_norm(
        *, x, topk_index, norm_score, block_static, bias, scale, n_group, topk_group, extra
    ):
        pass

    library.moe_sigmoid_group_topk_norm = moe_sigmoid_group_topk_norm
    library.rmsnorm = print
    monkeypatch.setitem(sys.modules, "kunlun_ops", library)
    stack = probe(Generation.TORCH29)
    name = "kunlun_ops.moe_sigmoid_group_topk_norm"
    assert stack.keyword(name, "block_static") == "block_static"
    found = {(d.kind, d.detail) for d in stack.differences() if d.op == name}
    assert found == {
        ("other keyword", "it calls block_statistic block_static"),
        ("unknown keyword", "its argument extra is not in the contract"),
    }
    # A callable that takes anything cannot be checked.
    assert {d.kind for d in stack.differences() if d.op == "kunlun_ops.rmsnorm"} == {"not checked"}


def test_library_with_an_undefined_symbol_is_named(monkeypatch, tmp_path):
    (tmp_path / "kunlun_ops.py").write_text("raise OSError('libxpuapi.so: undefined symbol: xpu_launch_async')")
    monkeypatch.syspath_prepend(str(tmp_path))
    stack = probe(Generation.TORCH29)
    with pytest.raises(MissingVendorOps, match="undefined symbol: xpu_launch_async"):
        stack.require(["kunlun_ops.rmsnorm"])


def test_required_names_must_be_in_the_contract():
    with pytest.raises(UnknownVendorName, match="no callable 'kunlun_ops"):
        probe(Generation.TORCH29).require(["kunlun_ops.rms_norm"])
