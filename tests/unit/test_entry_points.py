"""The entry points that vLLM calls in every process."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import vllm_kunlun
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.platforms.refusal import RefusedPlatform
from vllm_kunlun.platforms.start_error import StartError

HOST = TargetChoice("host", True, "a test says so")
INACTIVE = TargetChoice(None, False, "a test says so")
REFUSED = TargetChoice("p800", False, "a test says so", "the driver is missing; install it")


@pytest.fixture
def choose(monkeypatch):
    def choose(choice):
        monkeypatch.setattr(vllm_kunlun, "current_choice", lambda: choice)
        monkeypatch.setattr(vllm_kunlun, "_announced", set())

    return choose


@pytest.fixture
def messages(monkeypatch):
    found = []
    monkeypatch.setattr(vllm_kunlun.logger, "info", lambda text, *arguments: found.append(text % arguments))
    return found


def run_python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_entry_points_are_exactly_these():
    found = {
        (point.group, point.name, point.value)
        for group in ("vllm.platform_plugins", "vllm.general_plugins")
        for point in entry_points(group=group)
        if point.value.startswith("vllm_kunlun")
    }
    assert found == {
        ("vllm.platform_plugins", "kunlun", "vllm_kunlun:register"),
        ("vllm.general_plugins", "kunlun_model", "vllm_kunlun:register_model"),
        ("vllm.general_plugins", "kunlun_reasoning_parser", "vllm_kunlun:register_reasoning_parser"),
        ("vllm.general_plugins", "kunlun_tool_parser", "vllm_kunlun:register_tool_parser"),
    }


@pytest.mark.parametrize(
    ("target", "platform"), [("host", "host.HostPlatform"), ("emulated", "emulated.EmulatedPlatform")]
)
def test_importing_and_registering_import_neither_torch_nor_vllm(target, platform):
    code = (
        "import sys, vllm_kunlun; name = vllm_kunlun.register();"
        "print(name, sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'numpy', 'transformers')))"
    )
    assert run_python(code, VLLM_KUNLUN_TARGET=target) == f"vllm_kunlun.platforms.{platform} []\n"


def test_register_names_the_platform_again_and_again(choose):
    choose(HOST)
    assert [vllm_kunlun.register() for _ in range(3)] == ["vllm_kunlun.platforms.host.HostPlatform"] * 3


def test_register_gives_none_when_inactive(choose):
    choose(INACTIVE)
    assert vllm_kunlun.register() is None


def test_register_names_the_refusal_when_the_choice_is_an_error(choose):
    choose(REFUSED)
    assert vllm_kunlun.register() == f"{RefusedPlatform.__module__}.{RefusedPlatform.__qualname__}"


def test_refusal_raises_the_error_of_the_choice(monkeypatch):
    monkeypatch.setattr("vllm_kunlun.platforms.refusal.current_choice", lambda: REFUSED)
    with pytest.raises(StartError, match="the driver is missing; install it"):
        RefusedPlatform()


def test_vllm_does_not_swallow_the_refusal():
    code = (
        "from vllm_kunlun.platforms.start_error import StartError\n"
        "try:\n    from vllm.platforms import current_platform\n"
        "except StartError as error:\n    print('refused:', error)"
    )
    assert "refused: vllm-kunlun: the target p800 cannot be used" in run_python(code, VLLM_KUNLUN_TARGET="p800")


def test_choice_is_announced_once(choose, messages):
    choose(HOST)
    for _ in range(3):
        vllm_kunlun.register()
    assert messages == [f"vllm-kunlun {vllm_kunlun.__version__}: target host, because a test says so."]


def test_inactivity_is_announced_too(choose, messages):
    choose(INACTIVE)
    vllm_kunlun.register()
    assert messages == [f"vllm-kunlun {vllm_kunlun.__version__}: inactive, because a test says so."]


def test_child_processes_do_not_announce(choose, messages, monkeypatch):
    choose(HOST)
    monkeypatch.setattr("multiprocessing.parent_process", object)
    vllm_kunlun.register()
    assert messages == []


@pytest.mark.parametrize("entry", ["register_model", "register_reasoning_parser", "register_tool_parser"])
def test_general_entry_points_do_nothing_on_another_platform(entry, monkeypatch):
    monkeypatch.setattr(vllm_kunlun, "_is_platform_ours", lambda: False)
    monkeypatch.setitem(sys.modules, "vllm_kunlun.layers", None)  # importing either would raise
    monkeypatch.setitem(sys.modules, "vllm_kunlun.parsers", None)
    for name in ("layers", "parsers"):
        monkeypatch.delattr(vllm_kunlun, name, raising=False)
    getattr(vllm_kunlun, entry)()


def test_register_model_registers_the_layers(monkeypatch):
    from vllm_kunlun import layers

    calls = []
    monkeypatch.setattr(vllm_kunlun, "_is_platform_ours", lambda: True)
    monkeypatch.setattr(layers, "register", lambda: calls.append("layers"))
    vllm_kunlun.register_model()
    assert calls == ["layers"]
