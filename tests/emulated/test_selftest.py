"""The self-test on the emulator: known faults are found and worked around, and without the work-around it fails."""

from dataclasses import replace

import pytest
import torch

from tests.emulated.provider import implementations
from vllm_kunlun import emulator, ops
from vllm_kunlun.ops.providers import p800
from vllm_kunlun.ops.providers.p800 import attention, table
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.probe import probe
from vllm_kunlun.tools.selftest import faults as trying
from vllm_kunlun.tools.selftest.cases import plans, run_op
from vllm_kunlun.tools.selftest.fault_trials import TRIALS
from vllm_kunlun.tools.selftest.faults import Outcome, call_apart, faults_of, try_fault
from vllm_kunlun.tools.selftest.run import Scope, run
from vllm_kunlun.tools.selftest.subject import Subject

CONTRACT = load()
SWITCHABLE = [name for name, fault in CONTRACT.faults.items() if not fault.always]
NO_OP = {
    "fused-activation-from-1024-rows", "moe-pre-small-absent", "inplace-exponential-absent", "weak-ref-tensor-absent",
}  # fmt: skip
SMALL = {"linear-wide-output": "linear-wide-output:n=96:k=16"}


def emulated():
    """What the emulator that is installed now serves, with the provider as it is now."""
    generation = emulator.current().settings.generation
    served = implementations()
    rows = {name: ops.OpRow(name, "p800", "a test says so", generation.value) for name in served}
    return Subject("emulated", "a test says so", torch.device("cpu"), rows, served, probe(generation))


def running(*faults, generation="torch29"):
    return emulator.running(generation, faults=faults)


def tried(name, generation="torch29", on=True, **options):
    with running(*([SMALL.get(name, name)] if on else []), generation=generation):
        return try_fault(emulated(), CONTRACT.fault(name), **options)


def judged(name):
    """One op's cases in float16, its failures as the report shows them."""
    subject = emulated()
    scope = Scope(quick=True, only=(name,))
    return run(subject, scope, lambda what: None)


def test_every_fault_has_a_trial_but_those_of_ops_that_do_not_exist():
    assert CONTRACT.faults.keys() - TRIALS.keys() == {"max-instead-of-scale"}


def generation_of(name):
    return "torch29" if Generation.TORCH29 in CONTRACT.fault(name).generations else "torch25"


@pytest.mark.parametrize("name", SWITCHABLE)
def test_fault_that_is_switched_on_is_found_and_worked_around(name):
    found = tried(name, generation_of(name))
    assert found.status == ("unused" if name in NO_OP else "worked around"), found.detail
    assert found.detail.startswith("The obvious call: ")
    assert found.workaround == CONTRACT.fault(name).workaround


@pytest.mark.parametrize("name", [name for name in SWITCHABLE if name not in SMALL])
def test_fault_that_is_off_is_absent(name):
    assert tried(name, generation_of(name), on=False).status == "absent"


def test_what_is_always_so_is_present_and_worked_around():
    always = [name for name in TRIALS if CONTRACT.fault(name).always]
    assert {name: tried(name, on=False).status for name in always} == dict.fromkeys(always, "worked around")


def test_a_product_too_wide_for_the_emulator_is_not_tried():
    found = tried("linear-wide-output", on=False)
    assert (found.status, "248320 x 5120" in found.detail) == ("not probed", True)


@pytest.mark.parametrize("name", [name for name in SWITCHABLE if name not in NO_OP])
def test_without_work_arounds_a_fault_fails_and_names_op_case_and_work_around(name):
    with running(SMALL.get(name, name), generation=generation_of(name)):
        subject = emulated()
        found = try_fault(subject, CONTRACT.fault(name), workarounds=False)
    assert found.status == "not worked around"
    assert found.op in ops.ops() and found.case


def test_a_run_without_work_arounds_fails_for_each_fault_that_is_on(monkeypatch):
    on = ["sliding-window-off-by-one", "value-slots-several-kv-heads", "partial-rotary-crash"]
    monkeypatch.setattr("vllm_kunlun.tools.selftest.run.plans", lambda *given: [])
    monkeypatch.setattr("vllm_kunlun.tools.all_reduce.two_ranks", lambda backend: 1.0)
    with running(*on):
        report = run(emulated(), Scope(workarounds=False), lambda what: None)
    assert not report.passed
    assert [f.name for f in report.faults if f.status == "not worked around"] == [n for n in CONTRACT.faults if n in on]
    lines = "\n".join(report.failures)
    assert len(report.failures) == 3
    for op, name in zip(("varlen_attention", "reshape_and_cache", "rotary_embedding"), on, strict=True):
        assert f"{op}, case “" in lines and f"known fault {name}" in lines
        assert CONTRACT.fault(name).workaround in lines


# --- the provider without one of its work-arounds ---------------------------------------------------------------------


def naive_write(vendor):
    flash = vendor.function("kunlun_ops.reshape_and_cache_flash")

    def write(key_cache, value_cache, key, value, slots):
        rows = (key.contiguous(), value.contiguous(), key_cache, value_cache, slots[: key.size(0)])
        flash(*rows, BLHD_LAYOUT=False)

    return write


def without_slots(monkeypatch):
    service = replace(p800.SERVICES["reshape_and_cache"], make=naive_write)
    monkeypatch.setitem(table.SERVICES, "reshape_and_cache", service)


def without_window(monkeypatch):
    ask = table.ask
    monkeypatch.setattr(table, "ask", lambda *given: replace(ask(*given), prefill_window_counts_own=True))


def without_paged_sinks(monkeypatch):
    ask = table.ask
    monkeypatch.setattr(table, "ask", lambda *given: replace(ask(*given), paged_prefill_heeds_sinks=True))


def without_other_kernel(monkeypatch):
    monkeypatch.setattr(attention, "in_region", lambda *given, **numbers: False)


@pytest.mark.parametrize(
    ("fault", "remove", "op", "case"),
    [
        ("value-slots-several-kv-heads", without_slots, "reshape_and_cache", "300 tokens 2x96 block 256 halves"),
        ("sliding-window-off-by-one", without_window, "varlen_attention", "windows"),
        ("prefix-path-ignores-window-and-sinks", without_paged_sinks, "paged_attention", "sinks"),
    ],
)
def test_op_without_its_work_around_fails_its_cases(monkeypatch, fault, remove, op, case):
    with running():
        assert judged(op).passed
    remove(monkeypatch)
    with running(fault):
        report = judged(op)
        found = try_fault(emulated(), CONTRACT.fault(fault))
    assert not report.passed
    lines = [line for line in report.failures if line.startswith(f"{op}, case “{case}” in float16")]
    assert len(lines) == 1
    known = next(line for line in report.failures if line.startswith(f"{op}: known faults of what serves it: "))
    assert f"{fault} (work-around: {CONTRACT.fault(fault).workaround})" in known
    assert (found.status, found.op) == ("not worked around", op)
    assert "The op: " in found.detail


def test_float32_decode_without_the_other_kernel_fails(monkeypatch):
    without_other_kernel(monkeypatch)
    found = tried("decode-float32-block-64")
    assert found.status == "not worked around"
    assert found.case == "float32 decode, blocks of 64"


def test_limit_below_the_one_that_is_known_is_not_worked_around():
    with running("decode-batch-limit:batch=16"):
        found = try_fault(emulated(), CONTRACT.fault("decode-batch-limit"))
    assert (found.status, found.case) == ("not worked around", "decode of 16 requests")


def test_refused_cases_are_counted_and_no_failure():
    with running():
        subject = emulated()
        plan = next(plan for plan in plans(subject, True) if plan.op.name == "varlen_attention")
        found = run_op(subject, plan, False, lambda what: None)
    assert (found.status, found.count("refused"), found.timing) == ("passed", 1, None)
    assert "no soft cap" in next(case.message for case in found.cases if case.status == "refused")


def test_way_through_the_host_fails_a_case():
    with running():
        subject = emulated()

        def reads(out, *rest):
            out.sum().item()
            subject.functions["silu_and_mul"](out, *rest)

        waiting = replace(subject, functions={**subject.functions, "silu_and_mul": reads})
        plan = next(plan for plan in plans(waiting, True) if plan.op.name == "silu_and_mul")
        found = run_op(waiting, plan, False, lambda what: None)
    assert found.status == "failed"
    assert "HostRoundTrip" in found.cases[0].message


# --- one call in a process of its own, as on a card -------------------------------------------------------------------


def test_call_apart_finds_what_a_call_here_finds(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_TARGET", "emulated")
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_FAULTS", "value-slots-several-kv-heads")
    fault = CONTRACT.fault("value-slots-several-kv-heads")
    with running("value-slots-several-kv-heads"):
        subject = emulated()
        assert call_apart(subject, fault, "obvious") == trying.call(subject, fault, "obvious")
        assert call_apart(subject, fault, "served") == Outcome(True)


def test_process_that_dies_is_an_error_of_the_call(monkeypatch):
    monkeypatch.setattr(trying.sys, "executable", "/bin/false")
    with running():
        found = call_apart(emulated(), CONTRACT.fault("partial-rotary-crash"), "obvious")
    assert (found.right, found.raised, found.message) == (False, True, "the process ended with code 1")


def test_crash_where_no_error_is_known_is_not_taken_for_the_fault():
    def crashes(subject, fault, how):
        return Outcome(False, True, "the process ended with code -11")

    with running():
        subject = emulated()
        assert try_fault(subject, CONTRACT.fault("linear-wide-output"), run=crashes).status == "not probed"
        found = try_fault(subject, CONTRACT.fault("sliding-window-off-by-one"), run=crashes)
        assert (found.status, "-11" in found.detail) == ("not probed", True)
        assert try_fault(subject, CONTRACT.fault("partial-rotary-crash"), run=crashes).status == "not worked around"


def test_host_has_no_vendor_faults():
    assert faults_of(Subject("host", "", torch.device("cpu"), {}, {})) == ()
