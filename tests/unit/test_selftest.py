"""The self-test judges what an op wrote, reports it in files, and makes the support tables from submissions."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from vllm_kunlun import ops
from vllm_kunlun.cli.main import app
from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.ops.contract import Case
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.tools import all_reduce
from vllm_kunlun.tools.selftest import submission, timing
from vllm_kunlun.tools.selftest.cases import plans, run_op
from vllm_kunlun.tools.selftest.files import as_html, as_json
from vllm_kunlun.tools.selftest.judging import compare, copied, judge
from vllm_kunlun.tools.selftest.results import AllReduceResult, FaultResult, OpResult
from vllm_kunlun.tools.selftest.run import Scope, run, steps
from vllm_kunlun.tools.selftest.subject import NothingToTest, Subject, subject

CPU = torch.device("cpu")
RMS_NORM, EMBEDDING = (ops.ops()[name] for name in ("rms_norm", "embedding"))


def first(op, dtype=torch.float32):
    return next(op.cases(torch.Generator().manual_seed(3), dtype))


def serving(**functions):
    """A subject on the CPU whose ops are the references, but for those given."""
    served = {name: op.reference for name, op in ops.ops().items()} | functions
    rows = {name: ops.OpRow(name, "torch", "a test says so", "torch") for name in served}
    return Subject("host", "a test says so", CPU, rows, served)


def report_of(subject, *names, **changes):
    found = run(subject, Scope(quick=True, only=names), lambda what: None)
    return replace(found, **changes)


# --- judging ----------------------------------------------------------------------------------------------------------


def test_error_and_digits_of_a_result():
    wanted = torch.tensor([3.0, 4.0, 0.0, 0.0])
    error = compare("out", wanted + torch.tensor([0.0, 0.05, 2e-3, 2e-6]), wanted, 0.02)
    assert error.relative_l2 == pytest.approx((0.05**2 + 2e-3**2) ** 0.5 / 5, rel=1e-4)
    assert dict(error.beyond) == {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3}
    assert (error.elements, error.passed) == (4, True)
    assert not compare("out", wanted + 0.1, wanted, 0.02).passed


@pytest.mark.parametrize(
    ("actual", "wanted", "finite"),
    [
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([float("inf"), 1.0], [3.0, 1.0], False),
        ([float("-inf"), 1.0], [float("-inf"), 1.0], True),
        ([float("inf"), 1.0], [float("-inf"), 1.0], False),
    ],
)
def test_what_is_not_finite_is_wrong_unless_it_should_be(actual, wanted, finite):
    error = compare("out", torch.tensor(actual), torch.tensor(wanted), 0.5)
    assert (error.relative_l2 is not None, error.passed) == (finite, finite)
    assert error.beyond[1] == (0 if finite else 1)


def test_right_result_passes_and_a_wrong_one_names_argument_and_limit():
    case = first(RMS_NORM)
    assert judge(RMS_NORM, case, RMS_NORM.reference, CPU).status == "passed"

    def twice(out, *rest):
        RMS_NORM.reference(out, *rest)
        out *= 2

    found = judge(RMS_NORM, case, twice, CPU)
    assert (found.status, found.worst.argument) == ("failed", "out")
    assert found.worst.relative_l2 == pytest.approx(1.0, rel=1e-3)
    assert "out is off by 1.0e+00 (relative L2), allowed 2e-06" in found.message


def test_output_that_is_left_alone_is_found_by_its_poison():
    found = judge(RMS_NORM, first(RMS_NORM), lambda *args: None, CPU)
    assert (found.status, found.worst.relative_l2) == ("failed", None)
    assert "not finite" in found.message


def test_copies_must_be_equal():
    def rounded(out, ids, weight):
        out.copy_(weight[ids.long()].bfloat16())

    found = judge(EMBEDDING, first(EMBEDDING), rounded, CPU)
    assert found.status == "failed"
    assert re.search(r"out must be equal, and \d+ of 33 elements differ", found.message)


def test_written_input_is_wrong():
    def overwrites(out, input, *rest):
        RMS_NORM.reference(out, input, *rest)
        input.zero_()

    assert "the input input was written" in judge(RMS_NORM, first(RMS_NORM), overwrites, CPU).message


def test_refusal_of_the_provider_is_told_from_an_error():
    class Refused(ValueError):
        pass

    def refuses(*args):
        raise Refused("no such kernel")

    case = first(RMS_NORM)
    assert judge(RMS_NORM, case, refuses, CPU, Refused).status == "refused"
    found = judge(RMS_NORM, case, refuses, CPU)
    assert (found.status, found.message) == ("failed", "no such kernel")


def test_copies_of_arguments_keep_strides_and_shared_memory():
    both = torch.arange(24.0).view(2, 3, 4)
    args = copied({"key": both[0].t(), "value": both[1], "scale": 0.5})
    assert (args["key"].stride(), args["scale"]) == ((1, 4), 0.5)
    assert torch.equal(args["key"], both[0].t())
    assert args["key"].untyped_storage().data_ptr() == args["value"].untyped_storage().data_ptr()
    args["key"].zero_()
    assert both[0].any()


def test_quick_runs_one_dtype_of_each_op_and_full_runs_all():
    quick, full = plans(serving(), True), plans(serving(), False)
    assert {plan.op.name for plan in quick} == {plan.op.name for plan in full} == set(ops.ops())
    assert all(len(plan.dtypes) == 1 for plan in quick)
    assert {plan.op.name: plan.dtypes for plan in full} == {name: op.dtypes for name, op in ops.ops().items()}


def test_bytes_and_operations_of_a_call():
    linear, attention = ops.ops()["linear"], ops.ops()["paged_attention"]
    args = {"out": torch.empty(2, 5), "input": torch.empty(2, 3), "weight": torch.empty(5, 3), "bias": None}
    case = Case("", torch.float32, args)
    assert timing.moved_bytes(linear, case) == 4 * (10 + 6 + 15)
    assert timing.operations(linear, case) == 2 * 2 * 3 * 5
    case = next(c for c in attention.cases(torch.Generator(), torch.float16) if c.name == "one decode")
    assert timing.operations(attention, case) == 4 * 3 * 64 * 37
    assert timing.operations(RMS_NORM, first(RMS_NORM)) is None


# --- the run and its report -------------------------------------------------------------------------------------------


def wrong_norm(out, *rest):
    RMS_NORM.reference(out, *rest)
    out += 0.5


def test_a_wrong_op_fails_the_run_and_is_named_with_its_case():
    assert report_of(serving(), "rms_norm", "embedding").passed
    report = report_of(serving(rms_norm=wrong_norm), "rms_norm", "embedding")
    assert not report.passed
    assert {op.name: op.status for op in report.ops} == {"rms_norm": "failed", "embedding": "passed"}
    assert report.failures[0].startswith("rms_norm, case “(1, 576)+0.0” in bfloat16: out is off by")


def test_progress_is_told_as_often_as_it_was_announced():
    told = []
    scope = Scope(quick=True, only=("embedding", "argmax"))
    run(serving(), scope, told.append)
    assert told == ["argmax bfloat16", "embedding bfloat16"]
    assert steps(serving(), scope) == len(told)


def test_reports_are_complete_alone_and_escape_what_they_show():
    report = report_of(serving(rms_norm=lambda *args: None), "rms_norm", target_reason="<script>alert(1)</script>")
    data = json.loads(as_json(report))
    assert (data["passed"], data["schema"], data["ops"][0]["name"]) == (False, 1, "rms_norm")
    assert data["ops"][0]["cases"][0]["errors"][0]["relative_l2"] is None
    assert data["versions"]["torch"] == torch.__version__
    page = as_html(report)
    assert "Self-test failed on target host" in page
    assert "&lt;script&gt;alert" in page and "<script" not in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)


def test_faults_and_a_failed_sum_are_shown():
    fault = FaultResult("f", "wrong", "not worked around", ("v.op",), "a symptom", "a way round", "argmax", "c", "d.")
    summed = AllReduceResult("failed", "gloo", "no sum after 60 s")
    report = report_of(serving(), "argmax", faults=(fault,), all_reduce=summed)
    assert report.failures == [
        "argmax, case “c”: known fault f: d. Known work-around: a way round.",
        "all-reduce over gloo: no sum after 60 s",
    ]
    page = as_html(report)
    assert all(text in page for text in ("A symptom.", "not worked around", "no sum after 60 s"))


def test_op_without_a_single_right_case_is_not_called_right():
    assert OpResult("x", "torch", "torch", "", ()).status == "not run"


# --- the target of this process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TargetChoice(None, False, "vLLM has a device"), "inactive here, because vLLM has a device"),
        (TargetChoice("p800", False, "", "no /dev/xpu0"), "no /dev/xpu0"),
    ],
)
def test_without_a_target_there_is_nothing_to_test(choice, message):
    with pytest.raises(NothingToTest, match=message):
        subject(choice)


def test_compiled_kernels_are_judged_and_timed():
    here = subject(TargetChoice("host", True, "a test says so"))
    plan = next(plan for plan in plans(here, True) if plan.op.name == "silu_and_mul")
    found = run_op(here, plan, True, lambda what: None)
    assert (found.provider, found.status, found.count("passed")) == ("host", "passed", 8)
    assert found.timing.seconds > 0 and found.timing.moved == 2 * 3 * 130 * 257


# --- two ranks --------------------------------------------------------------------------------------------------------


def test_two_ranks_reach_the_sum():
    assert 0 < all_reduce.two_ranks("gloo") < 60


def stand_in(code):
    def start(rank, store, backend):
        from subprocess import PIPE, Popen

        return Popen([sys.executable, "-c", code], text=True, stdout=PIPE, stderr=PIPE)

    return start


def test_ranks_that_wait_for_ever_end_at_the_limit(monkeypatch):
    monkeypatch.setattr(all_reduce, "_start", stand_in("import time; time.sleep(600)"))
    with pytest.raises(all_reduce.AllReduceFailed, match="no sum after 1 s; rank 0 still waits"):
        all_reduce.two_ranks("gloo", limit=1)


def test_rank_that_fails_is_named_with_its_last_words(monkeypatch):
    monkeypatch.setattr(all_reduce, "_start", stand_in("raise SystemExit('BKCL error 7')"))
    with pytest.raises(all_reduce.AllReduceFailed, match="rank 0 failed: BKCL error 7"):
        all_reduce.two_ranks("nccl")


# --- submissions ------------------------------------------------------------------------------------------------------


def submitted(path, report):
    submission.write_submission(path, report)
    return submission.read_submission(path)


def test_submission_survives_its_file_and_says_little(tmp_path):
    report = report_of(serving(), "argmax", environment={"HF_TOKEN": "x"}, machine={"cpu": "A CPU", "cores": 2})
    data = submitted(tmp_path / "x.json", report)
    assert data["ops"] == {
        "argmax": data["ops"]["argmax"] | {"provider": "torch", "passed": 9, "refused": 0, "failed": 0}
    }
    assert "environment" not in data and "cases" not in data["ops"]["argmax"]
    assert len((tmp_path / "x.json").read_text()) < 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is no vllm-kunlun hardware report"), ('{"kind": "x"}', "--submit-file makes one")],
)
def test_other_files_are_no_submissions(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(submission.BadSubmission, match=message):
        submission.read_submission(tmp_path / "x.json")


def test_submission_with_a_part_missing_is_refused(tmp_path):
    data = submitted(tmp_path / "x.json", report_of(serving(), "argmax"))
    (tmp_path / "x.json").write_text(json.dumps({**data, "machine": "mine"}))
    with pytest.raises(submission.BadSubmission, match="machine missing or of another type"):
        submission.read_submission(tmp_path / "x.json")


def test_tables_say_not_run_until_a_report_says_otherwise(tmp_path):
    host = submitted(tmp_path / "host.json", report_of(serving(), "argmax", machine={"cpu": "A CPU", "cores": 2}))
    emulated = {**host, "target": "emulated"}
    for reports in ([], [host], [emulated]):
        assert "| Kunlun3 P800 | `p800` | not run | not run |" in submission.hardware_table(reports)
        assert submission.ops_table(reports, ["argmax"]).splitlines()[-1].endswith("| not run |")
    cards = {"cards": 8, "card_memory_gib": 96.0}
    wrong = {"argmax": {"passed": 8, "refused": 2, "failed": 1}}
    card = {**host, "target": "p800", "machine": cards, "ops": wrong, "faults": {"a": "absent", "b": "worked around"}}
    table = submission.hardware_table([card, host])
    assert "Kunlun3 P800" not in table
    assert "| 8 x P800, 96.0 GiB | `p800` |" in table and "| 0 of 1 | 2 | 1 of 2 |" in table
    assert "| A CPU, 2 cores | `host` |" in table
    ops_table = submission.ops_table([card, host], ["argmax", "linear"]).splitlines()
    assert ops_table[2:] == [
        "| `argmax` | 9 right | 8 right, 2 refused, 1 **wrong** |",
        "| `linear` | not run | not run |",
    ]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_KUNLUN_TARGET", "host")
    return lambda *arguments: CliRunner().invoke(app, ["selftest", "--output", str(tmp_path / "out"), *arguments])


def test_command_writes_both_reports_and_leaves_with_0(command, tmp_path):
    result = command("--quick", "--op", "embedding")
    assert result.exit_code == 0, result.output
    assert "embedding" in result.output and "passed on target host" in result.output
    assert json.loads((tmp_path / "out/selftest.json").read_text())["passed"]
    assert "Self-test passed" in (tmp_path / "out/selftest.html").read_text()


def test_command_leaves_with_1_when_an_op_is_wrong(command, monkeypatch):
    from vllm_kunlun.cli import selftest

    monkeypatch.setattr(selftest, "_subject", lambda: serving(rms_norm=wrong_norm))
    result = command("--quick", "--op", "rms_norm")
    assert result.exit_code == 1
    assert "wrong: rms_norm, case “(1, 576)+0.0”" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "argmin"], "there is no op argmin"),
        (["--op", "argmax", "--submit-file", "x.json"], "needs a run of everything"),
        (["--without-workarounds", "--submit-file", "x.json"], "needs a run of everything"),
        (["--quick", "--op", "argmax", "--output", "/proc/none"], "cannot be written to /proc/none"),
    ],
)
def test_what_cannot_be_done_is_a_command_error(command, arguments, message):
    result = command(*arguments)
    assert isinstance(result.exception, CommandError)
    assert message in str(result.exception)
