"""The vendor's environment variables: what is set, what is left alone, what is refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest

from vllm_kunlun.cli import prechecks
from vllm_kunlun.cli.command_line import CommandLine
from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.targets.p800 import environment


def prepared(given: dict[str, str], monkeypatch: pytest.MonkeyPatch, generation: str = "torch29") -> dict[str, str]:
    monkeypatch.setenv("VLLM_KUNLUN_EMULATOR_GENERATION", generation)
    environment.prepare(emulated=True, environ=given)
    return given


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared({"XMLIR_FORCE_USE_XPU_GRAPH": "0", "XMLIR_CUDNN_ENABLED": ""}, monkeypatch)
    assert found["XMLIR_FORCE_USE_XPU_GRAPH"] == "0"
    assert found["XMLIR_CUDNN_ENABLED"] == ""
    assert found["XFT_USE_FAST_SWIGLU"] == "1"


@pytest.mark.parametrize(("generation", "there"), [("torch25", False), ("torch29", True)])
def test_some_are_for_one_generation(monkeypatch: pytest.MonkeyPatch, generation: str, there: bool) -> None:
    assert ("XMLIR_DYNAMO_WORKAROUND" in prepared({}, monkeypatch, generation)) is there


def test_nothing_forbidden_is_ever_set() -> None:
    assert not {variable.name for variable in environment.SET} & {v.name for v in environment.FORBIDDEN}


@pytest.mark.parametrize("name", ["XPU_DUMMY_EVENT", "XTORCHRUN_CLEAN"])
def test_forbidden_variables_are_named(name: str) -> None:
    problem = environment.problem({name: "1"})
    assert problem is not None
    assert problem.startswith(f"{name} is set: ")
    assert problem.endswith("Unset it.")
    assert environment.problem({name: "0"}) is None


@pytest.mark.parametrize("given", environment.VISIBLE)
def test_both_lists_of_cards_become_equal(given: str) -> None:
    environ = {given: "2,3"}
    environment.same_cards(environ, is_child=False)
    assert environ == dict.fromkeys(environment.VISIBLE, "2,3")


def test_lists_of_cards_that_differ_are_an_error_of_the_user_and_vllms_choice_in_a_child() -> None:
    environ = {"XPU_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    environment.same_cards(environ, is_child=False)
    assert "name different cards" in (environment.problem(environ) or "")
    environment.same_cards(environ, is_child=True)
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment.problem(environ) is None


def test_a_problem_ends_the_start_with_its_sentence() -> None:
    code = (
        "from vllm_kunlun.platforms.start_error import StartError\n"
        "try:\n    from vllm.platforms import current_platform\n"
        "except StartError as error:\n    print('refused:', error)"
    )
    variables = {"VLLM_KUNLUN_TARGET": "emulated", "XPU_DUMMY_EVENT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100, check=True
    )
    assert "refused: vllm-kunlun: XPU_DUMMY_EVENT is set" in done.stdout


@pytest.mark.parametrize(("target", "refused"), [("p800", True), ("emulated", True), ("host", False)])
def test_serve_refuses_a_forbidden_variable_before_vllm_is_imported(
    target: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XPU_DUMMY_EVENT", "1")
    request = prechecks.Request(CommandLine(("model",)), "model", TargetChoice(target, True, ""))
    with pytest.raises(CommandError, match="XPU_DUMMY_EVENT is set") if refused else contextlib.nullcontext():
        prechecks.vendor_variables_can_work(request)
