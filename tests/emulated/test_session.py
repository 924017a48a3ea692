"""Installing, settings from the environment, generations, and stand-ins that are taken out again."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_kunlun import emulator
from vllm_kunlun.emulator import EmulatorStateError, Settings
from vllm_kunlun.emulator.dispatcher import schema
from vllm_kunlun.emulator.overlap import overlap
from vllm_kunlun.emulator.shapes import Dimensions, ShapeMismatch
from vllm_kunlun.platforms.envs import EnvironmentVariableError
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.upstream.stand_in import StandIns, StandInTargetMissing


def test_environment_decides_without_settings(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_GENERATION", "torch25")
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_FAULTS", "decode-batch-limit:batch=8, inplace-exponential-absent")
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_MISSING", "rmsnorm,xspeedgate_ops.fused_moe")
    session = emulator.install(device=False)
    assert session is emulator.current()
    assert session.settings == Settings(
        Generation.TORCH25,
        {"decode-batch-limit": {"batch": 8}, "inplace-exponential-absent": {}},
        frozenset({"kunlun_ops.rmsnorm", "xspeedgate_ops.fused_moe", "xspeedgate_ops.inplace_exponential"}),
    )


def test_unset_environment_is_the_newer_stack_without_faults():
    assert Settings.from_environment() == Settings()


def test_unknown_generation_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_GENERATION", "torch26")
    with pytest.raises(EnvironmentVariableError, match="VLLM_KUNLUN_EMULATOR_GENERATION=torch26"):
        Settings.from_environment()


@pytest.mark.parametrize(("text", "problem"), [("rmsnorm,,swiglu", "is empty"), ("swiglu,swiglu", "listed twice")])
def test_lists_with_mistakes_are_errors(monkeypatch, text, problem):
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_MISSING", text)
    with pytest.raises(EnvironmentVariableError, match=problem):
        Settings.from_environment()


def test_libraries_are_importable_while_it_runs():
    with emulator.running():
        import cocopod
        import kunlun_ops
        import xspeedgate_ops

        assert "Emulated" in kunlun_ops.__doc__ + xspeedgate_ops.__doc__ + cocopod.__doc__
    assert not {"kunlun_ops", "xspeedgate_ops", "cocopod"} & sys.modules.keys()


def test_it_is_installed_once():
    with emulator.running(), pytest.raises(EmulatorStateError, match="installed already"):
        emulator.install()
    with pytest.raises(EmulatorStateError, match="not installed"):
        emulator.current()


def test_generations_have_their_own_callables():
    with emulator.running("torch25", device=False):
        import kunlun_ops as older

        assert hasattr(older, "moe_fc_v3") and not hasattr(older, "compute_slot_mappings")
        assert hasattr(torch.ops.xspeedgate_ops, "fused_moe")
    with emulator.running("torch29", device=False):
        import kunlun_ops as newer

        assert hasattr(newer, "compute_slot_mappings") and not hasattr(newer, "moe_fc_v3")
        assert not hasattr(torch.ops.xspeedgate_ops, "fused_moe")


def test_renamed_keyword_is_refused_under_its_other_name():
    for generation, right, wrong in (
        ("torch25", "block_static", "block_statistic"),
        ("torch29", "block_statistic", "block_static"),
    ):
        with emulator.running(generation, device=False):
            import kunlun_ops

            others = {"x", "topk_index", "norm_score", "bias", "scale", "n_group", "topk_group"}
            arguments = dict.fromkeys(others)
            with pytest.raises(TypeError, match=right):
                kunlun_ops.moe_sigmoid_group_topk_norm(**arguments, **{wrong: None})
            with pytest.raises(emulator.NotEmulatedYet):
                kunlun_ops.moe_sigmoid_group_topk_norm(**arguments, **{right: None})


def test_arguments_of_one_generation_only():
    op = load().op("kunlun_ops.causal_conv1d_update")
    assert "num_accepted_tokens_cpu" in {a.name for a in op.arguments_in(Generation.TORCH25)}
    assert "num_accepted_tokens_cpu" not in {a.name for a in op.arguments_in(Generation.TORCH29)}


@pytest.mark.parametrize("generation", list(Generation))
def test_every_dispatched_callable_has_a_schema_that_torch_reads(generation):
    ops = [op for op in load().in_generation(generation) if op.library == "xspeedgate_ops" and op.arguments is not None]
    assert len(ops) > 25
    for op in ops:
        parsed = torch._C.parse_schema(schema(op, Settings(generation)))
        assert [a.name for a in parsed.arguments] == [a.keyword(generation) for a in op.arguments_in(generation)]
        written = [a.name for a in parsed.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == [n for n in op.written if generation in op.argument(n).generations]


def test_stand_ins_are_undone_last_first():
    holder, stand_ins = SimpleNamespace(value=1), StandIns()
    before = sys.modules.get("json")
    assert stand_ins.attribute(holder, "value", 2) == 1
    stand_ins.attribute(holder, "value", 3)
    stand_ins.new_attribute(holder, "extra", 4)
    stand_ins.module("json", ModuleType("json"))
    stand_ins.module("kunlun_no_such_module", ModuleType("kunlun_no_such_module"))
    assert (holder.value, holder.extra) == (3, 4)
    stand_ins.undo()
    assert vars(holder) == {"value": 1}
    assert sys.modules.get("json") is before
    assert "kunlun_no_such_module" not in sys.modules


def test_stand_in_for_something_that_is_not_there_is_an_error():
    with pytest.raises(StandInTargetMissing, match="gone is to be replaced and is not there"):
        StandIns().attribute(SimpleNamespace(), "gone", 1)


@pytest.mark.parametrize(
    ("patterns", "tensors", "sizes"),
    [
        (["T, 2*d"], [(3, 10)], {"T": 3, "d": 5}),
        (["T, (Hq + 2*Hk)*D", "T, Hk*D", "D"], [(2, 32), (2, 8), (4,)], {"T": 2, "D": 4, "Hk": 2, "Hq": 4}),
        (["..., H", "..., 2*H"], [(2, 3, 4), (2, 3, 8)], {"H": 4}),
        (["NS, ...", "ND, ..."], [(2, 3), (5, 3)], {"NS": 2, "ND": 5}),
        (["B+1"], [(4,)], {"B": 3}),
        (["*"], [(1, 2, 3)], {}),
        (["T, *"], [(1, 9)], {"T": 1}),
        ([""], [()], {}),
    ],
)
def test_dimensions_are_solved_across_arguments(patterns, tensors, sizes):
    dimensions = Dimensions()
    for index, (pattern, shape) in enumerate(zip(patterns, tensors, strict=True)):
        dimensions.match(f"t{index}", shape, (pattern,))
    dimensions.finish()
    assert dimensions.sizes == sizes


@pytest.mark.parametrize(
    ("patterns", "tensors", "message"),
    [
        (["T, H", "H"], [(2, 3), (4,)], "t1: the dimension H is 4 and should be 3 .H = 3 from t0."),
        (["T, 2*d"], [(3, 9)], r"a dimension is 9, which 2\*d cannot be"),
        (["..., H", "..., H"], [(2, 3), (5, 3)], "others have"),
        (["T, H"], [(3,)], "has shape"),
        (["N*M", "M", "N"], [(7,), (2,), (3,)], r"t0: the dimension N\*M is 7 and should be 6"),
        (["B+1"], [(0,)], "cannot be"),
    ],
)
def test_dimensions_that_disagree(patterns, tensors, message):
    dimensions = Dimensions()
    with pytest.raises(ShapeMismatch, match=message):
        for index, (pattern, shape) in enumerate(zip(patterns, tensors, strict=True)):
            dimensions.match(f"t{index}", shape, (pattern,))
        dimensions.finish()


def test_overlap_is_exact():
    def by_marks(a, b):
        marks = torch.zeros(buffer.numel() * buffer.element_size(), dtype=torch.bool)
        bytes_of = [t.unsqueeze(-1).view(torch.uint8) if t.is_contiguous() else t for t in (a, b)]
        hit = [set(), set()]
        for found, tensor in zip(hit, bytes_of, strict=True):
            width, start = tensor.element_size(), tensor.data_ptr() - buffer.data_ptr()
            index = torch.zeros(tensor.shape, dtype=torch.long)
            for dim, stride in enumerate(tensor.stride()):
                places = torch.arange(tensor.shape[dim]) * stride * width
                index = index + places.view(-1, *[1] * (tensor.dim() - dim - 1))
            for offset in range(width):
                found.update((index + start + offset).flatten().tolist())
        assert max(hit[0] | hit[1]) < marks.numel()
        return bool(hit[0] & hit[1])

    buffer = torch.zeros(120)
    views = [
        buffer[:60], buffer[60:], buffer[59:80], buffer[::2], buffer[1::2], buffer.view(10, 12)[:, :4],
        buffer.view(10, 12)[:, 4:8], buffer.view(10, 12)[3:5, 2:6], buffer.view(5, 2, 12)[:, 0],
        buffer.view(5, 2, 12)[:, 1], buffer.view(5, 2, 3, 4)[:, 1].transpose(1, 2), buffer[7:8], buffer[1::3],
    ]  # fmt: skip
    for a in views:
        for b in views:
            assert overlap(a, b) == by_marks(a, b), (a.shape, a.stride(), b.shape, b.stride())
    assert not overlap(buffer[:0], buffer)
