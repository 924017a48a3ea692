"""The console script as a user sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_kunlun.cli import demo_model, doctor, environment, operators
from vllm_kunlun.cli.main import app
from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.version import __version__
from vllm_kunlun.tools.doctor.finding import Finding

SCRIPT = [sys.executable, "-m", "vllm_kunlun.cli.main"]


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def run_script(*arguments, **variables):
    import os

    return subprocess.run(
        [*SCRIPT, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_lists_the_commands(run):
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "doctor", "env", "ops", "build", "demo-model", "bench", "version"):
        assert f"  {command} " in result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from vllm_kunlun.cli.main import main\n"
        "sys.argv = ['vllm-kunlun', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n"
        "    print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'vllm', 'numpy', 'transformers', 'yaml'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_serve_help_says_how_to_list_all_flags(run):
    result = run("serve", "--help")
    assert result.exit_code == 0
    assert "--help=all" in result.stdout


def test_version(run):
    assert run("version").stdout.startswith(f"vllm-kunlun {__version__}\n")


def test_env_shows_value_and_source(run, monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_SPIN_US", "7")
    output = run("env").stdout
    assert "VLLM_KUNLUN_SPIN_US = 7  (environment)" in output
    assert "VLLM_KUNLUN_TARGET = auto  (default)" in output


def test_env_shows_values_that_cannot_be_used_and_unknown_names(run, monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_SPIN_US", "soon")
    monkeypatch.setenv("VLLM_KUNLUN_THREADS", "2")
    result = run("env")
    assert result.exit_code == 0
    assert "not an integer" in result.output
    assert "Did you mean VLLM_KUNLUN_NUM_THREADS?" in result.output


def test_env_as_json_has_every_variable(run, monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_CPU_BIND", "0-2")
    table = json.loads(run("env", "--format", "json").stdout)
    assert [row["name"] for row in table] == [variable.name for variable in envs.VARIABLES]
    assert {row["name"]: row["value"] for row in table}["VLLM_KUNLUN_CPU_BIND"] == "0,1,2"


def test_env_as_markdown_does_not_depend_on_this_machine(run, monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_SPIN_US", "7")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    lines = run("env", "--format", "md").stdout.splitlines()
    assert len(lines) == 2 + len(envs.VARIABLES)
    assert all(line.count("|") == 5 for line in lines)
    assert [line for line in lines if "VLLM_KUNLUN_CACHE_DIR" in line and "`~/.cache/vllm-kunlun`" in line]
    assert [line for line in lines if "VLLM_KUNLUN_SPIN_US" in line and "`7`" not in line]


def test_ops_prints_the_table(run, monkeypatch):
    ops = pytest.importorskip("vllm_kunlun.ops")
    row = ops.OpRow("rms_norm", "torch", "a test says so", "torch")
    monkeypatch.setattr(ops, "table", lambda: [row])
    assert json.loads(run("ops", "--json").stdout) == [
        {"name": "rms_norm", "provider": "torch", "reason": "a test says so", "instruction_set": "torch"}
    ]
    assert "a test says so" in run("ops").stdout


def test_demo_model_prints_the_folder(run, monkeypatch):
    monkeypatch.setattr(demo_model, "prepare_demo_model", lambda: (Path("/cache/demo"), "Demo"))
    result = run("demo-model")
    assert (result.exit_code, result.stdout) == (0, "/cache/demo\n")


def test_demo_model_that_cannot_be_made_is_a_command_error(monkeypatch):
    def missing(progress):
        raise demo_model.demo_model.DemoModelError("install it")

    monkeypatch.setattr(demo_model.demo_model, "ensure_demo_model", missing)
    with pytest.raises(CommandError, match="install it"):
        demo_model.prepare_demo_model()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_leaves_with_1_only_when_something_is_broken(run, monkeypatch, status, code):
    finding = Finding("torch", status, "2.13.0", "do this" if status != "ok" else "")
    monkeypatch.setattr(doctor, "collect", lambda: None)
    monkeypatch.setattr(doctor, "examine", lambda facts: [finding])
    result = run("doctor")
    assert result.exit_code == code
    assert "torch: 2.13.0" in result.stdout
    assert ("fix: do this" in result.stdout) is (status != "ok")


def test_doctor_report_that_cannot_be_written_is_a_command_error(run, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "collect", lambda: None)
    monkeypatch.setattr(doctor, "examine", lambda facts: [])

    def refuse(path, facts, findings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "write_report", refuse)
    result = run("doctor", "--report", str(tmp_path / "x"))
    assert isinstance(result.exception, CommandError)
    assert "Permission denied" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["serve", "/no/such/model"], {}, "there is no model at /no/such/model"),
        (["serve", "x", "-tp", "4096"], {}, "Lower --tensor-parallel-size"),
        (["serve", "x", "--dtype", "float64"], {}, "--dtype float64 is not supported"),
        (["serve", "x"], {"VLLM_KUNLUN_TARGET": "p800"}, "the target p800 cannot be used on this machine"),
        (["serve", "x"], {"VLLM_KUNLUN_TARGET": "p900"}, "did you mean 'p800'?"),
        (["serve", "org/model"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_refusals_are_one_screen_without_a_traceback(arguments, variables, message, tmp_path):
    environment = {"VLLM_KUNLUN_TARGET": "host", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    done = run_script(*arguments, "--port", "0", **{**environment, "HF_HUB_CACHE": str(tmp_path), **variables})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 20


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["ops"], {"CXX": "false"}, "compiling the host kernels failed"),
        (["build"], {"CXX": "false"}, "compiling the host kernels failed"),
        (["ops"], {"VLLM_KUNLUN_CACHE_DIR": "/proc/none"}, "cannot be written to /proc/none"),
        (["demo-model"], {"VLLM_KUNLUN_CACHE_DIR": "here"}, "VLLM_KUNLUN_CACHE_DIR=here: not an absolute path"),
        (["build"], {"VLLM_KUNLUN_CACHE_DIR": "here"}, "VLLM_KUNLUN_CACHE_DIR=here: not an absolute path"),
        (["ops"], {"VLLM_KUNLUN_ISA": "mmx"}, "VLLM_KUNLUN_ISA=mmx"),
        (["bench", "peers", "--output", "/proc/none/x.json"], {}, "/proc/none"),
    ],
)
def test_failure_of_a_command_is_explained_without_a_traceback(arguments, variables, message, tmp_path):
    variables = {"VLLM_KUNLUN_CACHE_DIR": str(tmp_path), "VLLM_KUNLUN_TARGET": "host", **variables}
    done = run_script(*arguments, **variables)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("module", "arguments", "name"),
    [("torch", "ops", "torch"), ("torch", "build", "torch"), ("vllm", "serve org/model --port 0", "vLLM")],
)
def test_missing_package_is_explained(module, arguments, name, tmp_path):
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('none', name={module!r})")
    (tmp_path / "models--org--model").mkdir()
    done = run_script(
        *arguments.split(), PYTHONPATH=str(tmp_path), HF_HUB_CACHE=str(tmp_path), VLLM_KUNLUN_TARGET="host"
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {name} is not installed in this Python environment")


def test_doctor_names_a_setting_that_cannot_be_used():
    done = run_script("doctor", VLLM_KUNLUN_ISA="mmx")
    assert done.returncode == 1
    assert "fail target: VLLM_KUNLUN_ISA=mmx" in done.stdout
    assert "Traceback" not in done.stderr


def test_unknown_command_is_a_usage_error(run):
    result = run("sevre")
    assert result.exit_code == 2
    assert "sevre" in result.output


def test_table_rows_say_where_values_come_from():
    rows = {row.name: row for row in environment.rows({"HOME": "/home/a", "VLLM_KUNLUN_ISA": "avx2"})}
    assert (rows["VLLM_KUNLUN_ISA"].value, rows["VLLM_KUNLUN_ISA"].source) == ("avx2", "environment")
    assert (rows["VLLM_KUNLUN_NUM_THREADS"].value, rows["VLLM_KUNLUN_NUM_THREADS"].source) == ("auto", "default")


def test_operators_module_needs_no_torch_until_it_runs():
    assert "torch" not in vars(operators)
