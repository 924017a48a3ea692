"""The doctor's checks of a P800, with made-up facts, and how the facts are read from fakes of files and commands."""

import shutil
import subprocess
from dataclasses import replace

import pytest

from tests.unit.test_doctor import GOOD, GOOD_P800, P800
from vllm_kunlun import emulator
from vllm_kunlun.platforms.probe import TargetChoice, choose_target
from vllm_kunlun.targets.p800.contract import Generation
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.targets.p800.environment import FORBIDDEN
from vllm_kunlun.targets.p800.minimums import TORCH, WHEELS
from vllm_kunlun.targets.p800.probe import probe
from vllm_kunlun.tools import all_reduce
from vllm_kunlun.tools.doctor import examine, loading, vendor_facts
from vllm_kunlun.tools.doctor.facts import TorchFacts
from vllm_kunlun.tools.doctor.report import build_report
from vllm_kunlun.tools.doctor.vendor_facts import Monitor, ask_monitor, collect_vendor, parse_monitor
from vllm_kunlun.tools.doctor.vendor_ops import missing

ACTIVE = TargetChoice("p800", True, "a test says so")


def with_vendor(**changes):
    return replace(GOOD_P800, vendor=replace(GOOD_P800.vendor, **changes))


def with_wheels(**versions):
    added = {name.replace("_", "-"): (version,) if version else () for name, version in versions.items()}
    return replace(GOOD_P800, distributions={**GOOD_P800.distributions, **added})


def with_library(error):
    return with_vendor(libraries={"/v/kunlun_ops/_C.so": error, "/v/cocopod/_C.so": ""})


@pytest.mark.parametrize(
    ("facts", "name", "status", "value", "fix"),
    [
        (
            replace(GOOD_P800, torch=TorchFacts("2.5.1+cu118", "cuda 11.8")),
            *(
                "torch",
                "fail",
                "a stack for vLLM 0.15 and older; vLLM 0.25.1 needs torch 2.9",
                "torch==2.9.0, xpytorch",
            ),
        ),
        (
            replace(GOOD_P800, torch=TorchFacts("2.9.1", "cuda 12.9")),
            *("torch", "fail", "torch was replaced", "xpytorch installer again"),
        ),
        (with_vendor(monitor=Monitor("5.0.21.21", "1.48")), "XPU driver", "fail", "older than 5.0.21.26", "update"),
        (with_vendor(monitor=Monitor("4.0.9.9", "1.48")), "XPU driver", "fail", "4.0.9.9", "driver on the host"),
        (with_vendor(monitor=Monitor("5.2.0.0", "1.47")), "XPU firmware", "fail", "older than 1.48", "firmware"),
        (with_vendor(monitor=Monitor("5.2.0.0", None)), "XPU firmware", "warn", "does not show", "1.48 is the least"),
        (
            with_vendor(monitor=Monitor(error="xpu-smi is not on PATH")),
            "XPU driver",
            "warn",
            "PATH",
            "mount the host's",
        ),
        (with_vendor(control_device=False), "XPU control device", "fail", "/dev/xpuctrl", "--device=/dev/xpuctrl"),
        (with_vendor(closed=("/dev/xpu0",)), "XPU device files", "fail", "may not open /dev/xpu0", "--privileged"),
        (replace(GOOD_P800, python="3.11.7"), "Python of the vendor's wheels", "fail", "3.11.7", "Python 3.10"),
        (with_wheels(kunlun_ops=None), "kunlun-ops", "fail", "not installed", "kunlun-ops >=0.1.59,<0.2 for torch 2.9"),
        (
            with_wheels(xspeedgate_ops="1.1.0+53992ca"),
            *("xspeedgate-ops", "warn", "1.1.0+53992ca belongs to the stack torch25", "as a whole"),
        ),
        (with_wheels(cocopod="3.0"), "cocopod", "warn", "is in no known stack", "in this order"),
        (
            with_library("/v/_C.so: undefined symbol: _ZN3c105ErrorC2Ev"),
            *("library _C.so", "fail", "it lacks the symbol _ZN3c105ErrorC2Ev", "built for another torch"),
        ),
        (
            with_library("libxpuapi.so: cannot open shared object file: No such file or directory"),
            *("library _C.so", "fail", "libxpuapi.so", "LD_LIBRARY_PATH"),
        ),
        (with_library("it ended the process with signal 11"), "library _C.so", "fail", "signal 11", "as a whole"),
        (
            with_vendor(missing_ops=("kunlun_ops.swiglu: install kunlun_ops",)),
            *("vendor ops", "fail", "kunlun_ops.swiglu: install", "as a whole"),
        ),
        (
            with_vendor(all_reduce="no sum after 60 s; rank 0 still waits for the other one"),
            *("link between cards", "fail", "no sum after 60 s", "xpu-smi topo -m"),
        ),
        (
            replace(GOOD_P800, environ={"XMLIR_FORCE_USE_XPU_GRAPH": "0"}),
            *("XMLIR_FORCE_USE_XPU_GRAPH", "warn", "is 0; it stands for: graphs", "unset XMLIR_FORCE_USE_XPU_GRAPH"),
        ),
        *(
            (replace(GOOD_P800, environ={row.name: "1"}), row.name, "fail", row.reason, f"unset {row.name}")
            for row in FORBIDDEN
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_wrong_with_a_p800_is_found_with_its_fix(facts, name, status, value, fix):
    found = [finding for finding in examine(facts) if finding.name == name and finding.status != "ok"]
    assert [finding.status for finding in found] == [status]
    assert value in found[0].value
    assert fix in found[0].fix


def test_stack_of_an_older_torch_is_one_line():
    facts = replace(GOOD_P800, torch=TorchFacts("2.5.1+cu118", "cuda 11.8"))
    found = next(finding for finding in examine(facts) if finding.name == "torch")
    assert "\n" not in found.value + found.fix


def test_what_is_right_is_said():
    values = {finding.name: finding.value for finding in examine(GOOD_P800) if finding.status == "ok"}
    assert values["XPU driver"] == "5.0.21.26"
    assert values["kunlun-ops"] == "0.1.60+abc"
    assert values["vendor libraries"] == "1 load with all their symbols"
    assert values["link between cards"] == "the sum over two cards is right"


def test_a_machine_without_a_p800_is_not_asked_about_one():
    names = {finding.name for finding in examine(replace(GOOD, environ={"XPU_DUMMY_EVENT": "1"}))}
    assert not {"XPU driver", "vendor libraries", "kunlun-ops", "link between cards", "XPU_DUMMY_EVENT"} & names


def test_tables_agree_with_the_vendor_contract():
    assert WHEELS.keys() == set(Generation)
    assert load().generation_of(TORCH.minimum) is Generation.TORCH29
    wheels = {wheel.replace("_", "-") for wheel in load().generations[Generation.TORCH29].wheels} - {"torch"}
    assert all({row.package for row in rows} == wheels for rows in WHEELS.values())


# --- reading the facts ------------------------------------------------------------------------------------------------

TABLE = """\
Mon Nov 30 12:00:00 2026
+-----------------------------------------------------------------------------+
| XPU-SMI               Driver Version: 5.0.21.26   Firmware Version: 0001.48 |
"""


@pytest.mark.parametrize(
    ("text", "driver", "firmware"),
    [
        (TABLE, "5.0.21.26", "0001.48"),
        ("DRIVER VERSION : 5.2.0.0\nFirmware: 1.50\n", "5.2.0.0", "1.50"),
        ("| Driver Version | 5.2.0.0 |", "5.2.0.0", None),
        ("no devices were found", None, None),
    ],
)
def test_versions_are_read_from_the_monitor(text, driver, firmware):
    assert parse_monitor(text) == Monitor(driver, firmware)


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    """Puts a program of this text in the place of xpu-smi."""

    def place(script):
        program = tmp_path / "xpu-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return place


def test_monitor_is_run(monitor):
    monitor(f"cat <<'TEXT'\n{TABLE}TEXT")
    assert ask_monitor() == Monitor("5.0.21.26", "0001.48")


def test_monitor_that_fails_is_told(monitor):
    monitor("echo 'cannot open /dev/xpuctrl' >&2; exit 3")
    assert ask_monitor().error == "xpu-smi left with code 3: cannot open /dev/xpuctrl"


def test_monitor_that_hangs_is_told(monitor, monkeypatch):
    monkeypatch.setattr(vendor_facts, "_MONITOR_SECONDS", 0.2)
    monitor("exec sleep 60")
    assert "timed out" in ask_monitor().error


def test_absent_monitor_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_monitor() == Monitor(error="xpu-smi is not on PATH")


@pytest.fixture
def quick(monkeypatch):
    """Everything that starts a process is replaced."""
    monkeypatch.setattr(vendor_facts, "ask_monitor", lambda: Monitor("5.2", "1.5"))
    monkeypatch.setattr(vendor_facts, "vendor_libraries", list)
    monkeypatch.setattr(vendor_facts, "missing_ops", lambda: ("one",))
    monkeypatch.setattr(vendor_facts, "sum_over_two_cards", lambda: "hangs")


def test_device_files_are_looked_up(quick, tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    assert not collect_vendor(P800, ACTIVE, tmp_path).control_device
    for name in ("xpuctrl", "xpu0"):
        (tmp_path / "dev" / name).touch()
    found = collect_vendor(P800, ACTIVE, tmp_path)
    assert (found.control_device, found.closed) == (True, ())
    monkeypatch.setattr(vendor_facts.os, "access", lambda path, mode: path.name != "xpu0")
    assert collect_vendor(P800, ACTIVE, tmp_path).closed == ("/dev/xpu0",)


@pytest.mark.parametrize(("cards", "summed"), [(1, None), (2, "hangs"), (8, "hangs")])
def test_sum_is_tried_between_two_cards(quick, tmp_path, cards, summed):
    machine = replace(P800, xpu_devices=tuple(f"/dev/xpu{i}" for i in range(cards)))
    found = collect_vendor(machine, ACTIVE, tmp_path)
    assert (found.all_reduce, found.missing_ops) == (summed, ("one",))


def test_nothing_is_run_on_a_card_that_cannot_be_used(quick, tmp_path, monkeypatch):
    machine = replace(P800, xpu_devices=("/dev/xpu0", "/dev/xpu1"))
    broken = choose_target(replace(machine, xpu_runtime=None), "auto")
    assert broken.error is not None
    found = collect_vendor(machine, broken, tmp_path)
    assert (found.all_reduce, found.missing_ops) == (None, ())
    monkeypatch.setattr(vendor_facts, "load_errors", lambda libraries: {"x": "undefined symbol: y"})
    assert collect_vendor(machine, ACTIVE, tmp_path).all_reduce is None


@pytest.mark.parametrize(
    ("machine", "choice"),
    [(GOOD.machine, TargetChoice("host", True, "")), (P800, TargetChoice("host", True, "VLLM_KUNLUN_TARGET=host"))],
)
def test_a_host_is_not_looked_at_for_cards(machine, choice):
    assert collect_vendor(machine, choice) is None


def test_failed_sum_is_a_text(monkeypatch):
    def fails(backend):
        raise all_reduce.AllReduceFailed(f"{backend}: rank 1 failed: BKCL error")

    monkeypatch.setattr(all_reduce, "two_ranks", fails)
    assert vendor_facts.sum_over_two_cards() == "nccl: rank 1 failed: BKCL error"
    monkeypatch.setattr(all_reduce, "two_ranks", lambda backend: 0.1)
    assert vendor_facts.sum_over_two_cards() == ""


def test_report_has_the_vendor_facts():
    assert build_report(GOOD_P800, [])["vendor"]["monitor"]["driver"] == "5.0.21.26"
    assert build_report(GOOD, [])["vendor"] is None


# --- libraries --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Shared libraries: one that loads, one with an undefined symbol, one that ends the process, one that is none."""
    folder = tmp_path_factory.mktemp("vendor") / "kunlun_ops"
    folder.mkdir()
    sources = {
        "good": 'extern "C" int one() { return 1; }',
        "lacks": "void symbol_of_another_torch(); void call() { symbol_of_another_torch(); }",
        "crash": "#include <cstdlib>\nstruct Crash { Crash() { abort(); } } crash;",
    }
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    for name, text in sources.items():
        (folder / f"{name}.cpp").write_text(text)
        command = [compiler, "-shared", "-fPIC", "-o", folder / f"{name}.so", folder / f"{name}.cpp"]
        subprocess.run(command, check=True, timeout=60)
    (folder / "text.so").write_text("not a library")
    (folder / "copies").mkdir()
    shutil.copy(folder / "lacks.so", folder / "copies" / "driver.so")
    return folder


def test_compiled_modules_are_found_without_copies_further_down(built, monkeypatch):
    monkeypatch.syspath_prepend(str(built.parent))
    assert [path.name for path in loading.vendor_libraries(["kunlun_ops", "no_such_package"])] == [
        "crash.so", "good.so", "lacks.so", "text.so",
    ]  # fmt: skip


def test_module_that_is_one_file_is_found(tmp_path, monkeypatch):
    import sysconfig

    path = tmp_path / f"cocopod{sysconfig.get_config_var('EXT_SUFFIX')}"
    path.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loading.vendor_libraries(["cocopod"]) == [path]


def test_each_library_is_loaded_with_all_its_symbols(built):
    paths = [built / f"{name}.so" for name in ("good", "lacks", "crash", "text")]
    good, lacks, crash, text = loading.load_errors(paths).values()
    assert good == ""
    assert "undefined symbol" in lacks and "symbol_of_another_torch" in lacks
    assert crash == "it ended the process with signal 6"
    assert "text.so" in text


def test_torch_that_cannot_be_imported_is_the_error_of_all(built, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    errors = loading.load_errors([built / "good.so"])
    assert list(errors.values()) == ["torch itself: ImportError: libtorch.so: cannot open shared object file"]


def test_without_libraries_no_process_is_started(monkeypatch):
    monkeypatch.setattr(loading.subprocess, "run", None)
    assert loading.load_errors([]) == {}


def test_missing_callables_are_listed_with_their_wheel():
    with emulator.running(missing=["kunlun_ops.swiglu", "kunlun_ops.rmsnorm"]):
        lines = missing(probe(Generation.TORCH29))
    assert [line.partition(":")[0] for line in lines] == ["kunlun_ops.rmsnorm", "kunlun_ops.swiglu"]
    assert all("install kunlun_ops" in line for line in lines)
    with emulator.running():
        assert missing(probe(Generation.TORCH29)) == []


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ('echo noise; echo \'["a", "b"]\'', ("a", "b")),
        (
            "echo 'ImportError: libxpu.so' >&2; exit 1",
            ("importing the vendor's libraries failed: ImportError: libxpu.so",),
        ),
    ],
)
def test_missing_callables_are_asked_for_in_a_process(script, lines, monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(vendor_facts.sys, "executable", str(fake))
    assert vendor_facts.missing_ops() == lines
