"""The vendor contract as it is shipped: complete, consistent, and readable without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_kunlun import emulator
from vllm_kunlun.emulator import shapes
from vllm_kunlun.emulator.settings import Settings
from vllm_kunlun.emulator.vendor import signature
from vllm_kunlun.targets.p800 import contract_load
from vllm_kunlun.targets.p800.contract import Confidence, Generation, UnknownVendorName
from vllm_kunlun.targets.p800.contract_load import ContractDataError, load
from vllm_kunlun.targets.p800.expressions import Expression, ExpressionError

CONTRACT = load()
KNOWN = [op for op in CONTRACT.ops.values() if op.arguments is not None]
DENSE = ("norm", "activation", "rotary", "kv_cache", "attention", "gemm", "sampling", "runtime")
KINDS = {"tensor", "tensors", "tensor or number", "generator", "int", "ints", "float", "bool", "str"}
FAULT_KINDS = {"refuses", "wrong", "unwritten", "surprise", "absent", "absent keyword", "default", "falls back"}


def by_name(ops):
    return [op.name for op in ops]


def test_every_family_has_its_file_and_no_file_is_left_over():
    files = {path.stem for path in contract_load.folder().glob("*.yaml")}
    assert files == {*contract_load.FAMILIES, "generations", "faults", "device"}
    assert list(CONTRACT.families()) == list(contract_load.FAMILIES)


def test_table_is_as_large_as_what_the_path_may_call():
    counts = {family: len(ops) for family, ops in CONTRACT.families().items()}
    assert sum(counts.values()) >= 125
    assert all(counts[family] >= 5 for family in contract_load.FAMILIES)


@pytest.mark.parametrize("op", KNOWN, ids=by_name(KNOWN))
def test_arguments_are_consistent(op):
    names = {argument.name for argument in op.arguments}
    assert len(names) == len(op.arguments)
    for argument in op.arguments:
        where = f"{op.name}({argument.name})"
        assert argument.kind in KINDS, where
        assert argument.io in ("in", "out", "inout"), where
        if argument.kind == "tensor":
            assert argument.shapes, where
        for text in (*argument.dtypes, *argument.shapes):
            if text.startswith("as "):
                assert text.removeprefix("as ") in names, where
            elif text in argument.shapes:
                shapes.parse(text)
        assert set(argument.may_alias) <= names, where


@pytest.mark.parametrize("op", KNOWN, ids=by_name(KNOWN))
def test_dtypes_are_torchs(op):
    import torch

    for owner in (*op.arguments, *op.returns):
        plain = [name for name in owner.dtypes if not name.startswith("as ")]
        assert [name for name in plain if not isinstance(getattr(torch, name, None), torch.dtype)] == []


def dimensions(op):
    """Names that shapes of the call bring up, and the arguments themselves."""
    found = {argument.name for argument in op.arguments}
    overrides = [text for form in op.forms for texts in form.shapes.values() for text in texts]
    for text in (*(text for argument in op.arguments for text in argument.shapes), *overrides):
        if not text.startswith("as "):
            found |= {name for dim in shapes.parse(text).dims if dim is not None for name in dim.names}
    return found


@pytest.mark.parametrize("op", KNOWN, ids=by_name(KNOWN))
def test_expressions_use_names_that_a_call_has(op):
    known, arguments = dimensions(op), {argument.name for argument in op.arguments}
    expressions = [limit.require for limit in op.limits] + [form.when for form in op.forms]
    expressions += [e for argument in op.arguments for e in (argument.bound, argument.equals) if e is not None]
    for expression in expressions:
        assert expression.names <= known, f"{op.name}: {expression}"
        assert {name for _, name in expression.attributes} <= arguments, f"{op.name}: {expression}"
    for form in op.forms:
        assert {*form.shapes, *form.required, *form.forbidden} <= arguments
    assert {limit.form for limit in op.limits} <= {None, *(form.name for form in op.forms)}


@pytest.mark.parametrize("op", KNOWN, ids=by_name(KNOWN))
def test_pairs_have_a_host_and_a_device_side(op):
    sides: dict[str, set[str]] = {}
    for argument in op.arguments:
        if argument.pair:
            sides.setdefault(argument.pair, set()).add(argument.place)
    assert all(places == {"host", "device"} for places in sides.values())
    named = {argument.name for argument in op.arguments if argument.name.endswith("_cpu")}
    hosts = {argument.name for argument in op.arguments if argument.place == "host"}
    assert named <= hosts


@pytest.mark.parametrize("generation", list(Generation))
@pytest.mark.parametrize("op", KNOWN, ids=by_name(KNOWN))
def test_every_signature_can_be_made(op, generation):
    if generation in op.presence:
        made = signature(op, Settings(generation))
        assert len(made.parameters) == len(op.arguments_in(generation))


@pytest.mark.parametrize("fault", CONTRACT.faults.values(), ids=list(CONTRACT.faults))
def test_faults_say_what_where_and_what_to_do(fault):
    assert fault.kind in FAULT_KINDS and fault.symptom and fault.workaround and fault.sources
    for name in fault.ops:
        op = CONTRACT.ops.get(name)
        known = set() if op is None or op.arguments is None else dimensions(op)
        if fault.region is not None and known and op.library != "torch":
            assert fault.region.names <= known | set(fault.parameters), name
        if fault.argument is not None:
            op.argument(fault.argument)
    assert set(fault.parameters) <= (fault.region.names if fault.region is not None else set())


def test_device_rules_name_faults_that_exist():
    assert [rule.fault for rule in CONTRACT.device_rules.values() if rule.fault] == ["exponential-on-host"]
    assert all(re.fullmatch(r"aten::\w+|Tensor\.\w+|torch\.cuda\.\w+", name) for name in CONTRACT.device_rules)
    assert all(rule.spelled for rule in CONTRACT.device_rules.values())


def test_what_is_disputed_is_recorded_with_both_readings():
    for name in ("slot-mapping-int32-only", "sliding-window-off-by-one", "split-norm-rope-plain-weight"):
        assert CONTRACT.fault(name).confidence is Confidence.UNCERTAIN
    for name in ("reshape_and_cache", "prefill_attention", "speculative_attention"):
        assert len(CONTRACT.op(f"kunlun_ops.{name}").readings) >= 2


def test_the_dense_path_is_emulated():
    known = [op for op in KNOWN if op.family in DENSE and Generation.TORCH29 in op.presence]
    # Paths that nothing calls, packed weights, and what only other model families use.
    later = {
        "kunlun_ops.quant_rmsnorm", "kunlun_ops.quant_fusedresidual_rmsnorm", "kunlun_ops.mrotary_embedding_neox",
        "xspeedgate_ops.rope_vit", "kunlun_ops.attention", "kunlun_ops.gemm_I8_I8_bf16_nt", "kunlun_ops.awq_gemm",
        "kunlun_ops.smooth_quant_matmul_column_row_kernels", "kunlun_ops.awq_dequantize", "xspeedgate_ops.gptq_gemm",
        "kunlun_ops.gptq_shuffle", "kunlun_ops.dequant_int4", "torch.nn.functional.linear",
    }  # fmt: skip
    assert {op.name for op in known} - emulator.emulated() == later


def test_emulated_callables_are_in_the_table():
    assert emulator.emulated() <= CONTRACT.ops.keys()


def test_reading_the_table_loads_no_torch():
    code = (
        "import sys; from vllm_kunlun.targets.p800 import contract_load, probe;"
        "contract_load.load(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_unknown_names_get_a_suggestion():
    with pytest.raises(UnknownVendorName, match=r"no callable 'kunlun_ops.rms_norm'. Did you mean kunlun_ops.rmsnorm"):
        CONTRACT.op("kunlun_ops.rms_norm")
    with pytest.raises(UnknownVendorName, match="Did you mean decode-batch-limit"):
        CONTRACT.fault("decode-batch-limits")
    with pytest.raises(UnknownVendorName, match="Did you mean weight"):
        CONTRACT.op("kunlun_ops.rmsnorm").argument("weights")


@pytest.mark.parametrize(
    ("torch_version", "generation"),
    [
        ("2.9.0+cu129", Generation.TORCH29),
        ("2.5.1+cu118", Generation.TORCH25),
        ("2.9.0", Generation.TORCH29),
        ("2.13.0+cpu", None),
    ],
)
def test_generation_of_a_torch_release(torch_version, generation):
    assert CONTRACT.generation_of(torch_version) is generation


@pytest.mark.parametrize("text", ["__import__('os')", "x.y", "[i for i in x]", "lambda: 1", "x[0]", "a b"])
def test_expressions_are_arithmetic_only(text):
    with pytest.raises(ExpressionError):
        Expression(text)


def edited(tmp_path: Path, family: str, change) -> Path:
    for path in contract_load.folder().glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    data = yaml.safe_load((tmp_path / f"{family}.yaml").read_text())
    change(data)
    (tmp_path / f"{family}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return tmp_path


def rename(entry, old, new):
    entry[new] = entry.pop(old)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("norm", lambda d: d["kunlun_ops.rmsnorm"]["arguments"]["x"].update(layout="rows"), "unknown keys layout"),
        ("norm", lambda d: rename(d["kunlun_ops.rmsnorm"], "note", "notes"), "unknown keys notes"),
        ("norm", lambda d: d["kunlun_ops.rmsnorm"].update(sources=["hearsay"]), "sources need a known kind"),
        ("norm", lambda d: d["kunlun_ops.rmsnorm"].update(signature="unknown"), "either arguments or signature"),
        ("norm", lambda d: d["kunlun_ops.add_rmsnorm"].pop("keywords_from"), "is required and follows"),
        ("norm", lambda d: d["kunlun_ops.rmsnorm"].update(keywords_from="scale"), "which is no argument"),
        (
            "faults",
            lambda d: d["partial-rotary-crash"].update(ops=["kunlun_ops.rope"]),
            "callables that the table",
        ),
    ],
)
def test_inconsistent_data_are_refused(tmp_path, family, change, message):
    with pytest.raises(ContractDataError, match=message):
        contract_load.read(edited(tmp_path, family, change))


def test_unchanged_copy_of_the_data_is_read(tmp_path):
    assert contract_load.read(edited(tmp_path, "norm", lambda data: None)).ops.keys() == CONTRACT.ops.keys()
