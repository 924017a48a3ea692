"""`./kunlun` with a stub for Python: which steps it takes, and what it says when one cannot be taken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("stub_python.sh")
STACK = dict(line.split("==") for line in (ROOT / "requirements/stack.txt").read_text().splitlines() if "==" in line)


class Checkout:
    """A copy of what the script reads, with stubs in front of the real interpreters."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("kunlun", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        (self.root / "csrc").mkdir()
        (self.root / "csrc" / "kernel.cpp").write_text("int one() { return 1; }\n")
        for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13"):
            self.stub(name)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "CALLS": str(self.calls_file),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def stub(self, name: str, text: str | None = None) -> None:
        target = self.bin / name
        target.write_text(text or STUB.read_text())
        target.chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "kunlun"), *arguments],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def take_calls(self) -> list[str]:
        """The calls of Python since the last time this was asked."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls

    def installs(self) -> list[str]:
        return [call for call in self.take_calls() if "pip --quiet install" in call or "-m venv" in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    assert checkout.run("doctor").returncode == 0
    checkout.take_calls()
    return checkout


def first_matching(calls: list[str], part: str) -> int:
    return next(index for index, call in enumerate(calls) if part in call)


def test_first_use_takes_every_step_in_order_then_runs_the_command(checkout: Checkout) -> None:
    done = checkout.run("serve", "some-model", "--port", "1")
    assert (done.returncode, done.stdout) == (0, "ran serve some-model --port 1\n")
    calls = checkout.take_calls()
    steps = ["-m venv", f"torch=={STACK['torch']}+cpu", "host.txt", "pip --quiet wheel", "vllm-0.25.1-", "--editable"]
    order = [first_matching(calls, part) for part in [*steps, "import torch, vllm", "vllm_kunlun.ops.native"]]
    assert order == sorted(order)
    assert "First use" in done.stderr
    assert "locked packages ... " in done.stderr


def test_everything_but_torch_of_the_indexes_is_installed_without_dependencies(checkout: Checkout) -> None:
    checkout.run("doctor")
    installs = [call for call in checkout.take_calls() if "pip --quiet install" in call]
    assert installs
    assert all("--no-deps" in call for call in installs)


def test_later_uses_install_nothing(ready: Checkout) -> None:
    done = ready.run("doctor", "--report")
    assert (done.stdout, done.stderr) == ("ran doctor --report\n", "")
    assert ready.installs() == []


def test_arguments_pass_unchanged(ready: Checkout) -> None:
    assert ready.run("serve", "a b", '{"x": 1}').stdout == 'ran serve a b {"x": 1}\n'


def test_python_3_11_is_preferred(checkout: Checkout) -> None:
    assert "(python3.11)" in checkout.run("doctor").stderr


def test_kunlun_python_is_used(checkout: Checkout) -> None:
    done = checkout.run("doctor", KUNLUN_PYTHON=str(checkout.bin / "python3.12"))
    assert f"({checkout.bin}/python3.12)" in done.stderr


def test_other_kunlun_python_remakes_the_environment(ready: Checkout) -> None:
    ready.stub("python3.12", STUB.read_text().replace("STUB_VERSION:-3.11.7", "OTHER:-3.12.1"))
    done = ready.run("doctor", KUNLUN_PYTHON=str(ready.bin / "python3.12"))
    assert "not KUNLUN_PYTHON's: making the environment anew" in done.stderr
    assert any("-m venv" in call for call in ready.installs())


def test_too_old_python_is_named_with_the_way_out(checkout: Checkout) -> None:
    done = checkout.run("serve", STUB_VERSION="3.9.18")
    assert done.returncode == 1
    assert "needs Python 3.10 to 3.13" in done.stderr
    assert "python3 is 3.9.18" in done.stderr
    assert "KUNLUN_PYTHON=" in done.stderr
    assert not checkout.venv.exists()


def test_kunlun_python_that_cannot_run_is_named(checkout: Checkout) -> None:
    done = checkout.run("serve", KUNLUN_PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert "/nowhere/python3 cannot be run" in done.stderr


def test_python_without_venv_module_is_passed_over(checkout: Checkout) -> None:
    text = STUB.read_text()
    checkout.stub("python3.11", text.replace("[[ $version =~ ^3\\.1[0-3]\\. ]] || exit 1", "exit 1"))
    done = checkout.run("doctor")
    assert done.returncode == 0
    assert "(python3.12)" in done.stderr


def test_little_disk_space_is_an_error_with_numbers(checkout: Checkout) -> None:
    checkout.stub("df", "#!/bin/sh\necho Filesystem\necho /dev/x 9 9 1048576 9% /\n")
    done = checkout.run("serve")
    assert done.returncode == 1
    assert "4 GB are needed, 1 GB are free" in done.stderr
    assert not checkout.venv.exists()


def test_disk_that_fills_up_is_said(checkout: Checkout) -> None:
    text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    done = checkout.run("serve", FAIL="host.txt", FAIL_TEXT=text)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert not (checkout.venv / ".kunlun-stamp").exists()


def test_missing_network_is_said_with_the_offline_way(checkout: Checkout) -> None:
    text = "WARNING: Retrying after connection broken by 'NewConnectionError(...)'"
    done = checkout.run("serve", FAIL="host.txt", FAIL_TEXT=text)
    assert done.returncode == 1
    assert "index cannot be reached" in done.stderr
    assert "PIP_FIND_LINKS" in done.stderr


def test_any_other_failure_shows_the_end_of_its_output_on_one_screen(checkout: Checkout) -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    done = checkout.run("serve", FAIL="host.txt", FAIL_TEXT=text)
    assert done.returncode == 1
    assert "line 99" in done.stderr
    assert len(done.stderr.splitlines()) < 24


def test_general_torch_build_is_taken_where_no_cpu_build_is_offered(checkout: Checkout) -> None:
    done = checkout.run("doctor", FAIL=r"\+cpu", FAIL_TEXT="ERROR: No matching distribution found")
    assert done.returncode == 0
    assert "not offered by the indexes" in done.stderr
    assert any(call.endswith(f"torch=={STACK['torch']}") for call in checkout.installs())


def test_missing_network_is_not_taken_for_a_missing_cpu_build(checkout: Checkout) -> None:
    done = checkout.run("doctor", FAIL=r"\+cpu", FAIL_TEXT="NameResolutionError: ...\nERROR: No matching distribution")
    assert done.returncode == 1
    assert "index cannot be reached" in done.stderr
    assert "not offered" not in done.stderr


def test_compile_failure_names_the_slower_way(checkout: Checkout) -> None:
    done = checkout.run("serve", FAIL="ops.native", FAIL_TEXT="error: compiling the host kernels failed")
    assert done.returncode == 1
    assert "VLLM_KUNLUN_OPS_PROVIDER=torch" in done.stderr
    assert checkout.run("serve", FAIL="ops.native", VLLM_KUNLUN_OPS_PROVIDER="torch").returncode == 0


def test_half_made_environment_is_mended_in_place(ready: Checkout) -> None:
    (ready.venv / ".kunlun-stamp").unlink()
    done = ready.run("doctor")
    assert "half-made" in done.stderr
    installs = ready.installs()
    assert any("host.txt" in call for call in installs)
    assert not any("-m venv" in call for call in installs)


def test_set_up_that_failed_goes_on_at_the_next_use(checkout: Checkout) -> None:
    assert checkout.run("doctor", FAIL="host.txt").returncode == 1
    done = checkout.run("doctor")
    assert (done.returncode, done.stdout) == (0, "ran doctor\n")


def test_environment_whose_python_does_not_start_is_made_anew(ready: Checkout) -> None:
    (ready.venv / "bin" / "python").write_text("#!/nowhere\n")
    done = ready.run("doctor")
    assert done.returncode == 0
    assert "does not start: making the environment anew" in done.stderr


def test_environment_that_lost_a_package_is_mended(ready: Checkout) -> None:
    python = ready.venv / "bin" / "python"
    python.write_text(STUB.read_text().replace('-) cat >/dev/null && echo "$version"', "-) exit 1"))
    assert "missing from" in ready.run("doctor").stderr


def test_library_that_was_cut_short_is_noticed(ready: Checkout) -> None:
    library = ready.venv / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.write_text("whole")
    assert "damaged: mending it" in ready.run("doctor").stderr
    assert ready.run("doctor").stderr == ""
    library.write_text("who")
    assert "damaged: mending it" in ready.run("doctor").stderr


def test_environment_that_does_not_import_is_made_anew(ready: Checkout) -> None:
    (ready.venv / ".kunlun-stamp").unlink()
    python = ready.venv / "bin" / "python"
    python.write_text(STUB.read_text().replace("case $call in", 'case $call in\n*"import torch, vllm"*) exit 1 ;;'))
    done = ready.run("doctor")
    assert done.returncode == 0
    assert "do not import: making" in done.stderr
    assert any("-m venv" in call for call in ready.installs())


def test_changed_lock_updates_the_environment(ready: Checkout) -> None:
    lock = ready.root / "requirements" / "host.txt"
    lock.write_text(lock.read_text() + "one-more==1.0\n")
    assert "requirements have changed" in ready.run("doctor").stderr
    assert ready.run("doctor").stderr == ""


def test_changed_kernel_source_compiles_again_and_installs_nothing(ready: Checkout) -> None:
    (ready.root / "csrc" / "kernel.cpp").write_text("int one() { return 2; }\n")
    assert "host kernels ... " in ready.run("doctor").stderr
    assert ready.installs() == []


def test_lost_kernel_library_is_compiled_again(ready: Checkout) -> None:
    (ready.venv / "bin" / "kernels.so").unlink()
    assert "host kernels ... " in ready.run("doctor").stderr


def test_vllm_wheel_is_built_once_per_user(ready: Checkout) -> None:
    shutil.rmtree(ready.venv)
    assert ready.run("doctor").returncode == 0
    calls = ready.take_calls()
    assert not any("pip --quiet wheel" in call for call in calls)
    assert any("vllm-0.25.1-cp311" in call for call in calls)


def test_xpytorch_environment_keeps_its_torch(checkout: Checkout, tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    subprocess.run([checkout.bin / "python3.11", "-m", "venv", vendor], env=checkout.environment, check=True)
    (vendor / "lib/python3.10/site-packages/torch_xmlir").mkdir(parents=True)
    checkout.take_calls()
    done = checkout.run("doctor", VIRTUAL_ENV=str(vendor))
    assert (done.returncode, done.stdout) == (0, "ran doctor\n")
    assert "its torch stays" in done.stderr
    calls = checkout.take_calls()
    assert not any("install" in call and "torch==" in call for call in calls)
    assert [call.rpartition("/")[2] for call in calls if "missing.py" in call] == ["p800.txt"]
    assert not any("host.txt" in call for call in calls)
    assert not checkout.venv.exists()


def test_two_at_once_set_up_once(checkout: Checkout) -> None:
    processes = [checkout.start("doctor", STUB_VENV_SECONDS="1") for _ in range(2)]
    results = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    assert [result[0] for result in results] == ["ran doctor\n"] * 2
    assert sum("waiting for it" in result[1] for result in results) == 1
    assert sum("-m venv" in call for call in checkout.installs()) == 1


def test_server_does_not_hold_the_lock(ready: Checkout) -> None:
    command = ready.venv / "bin" / "vllm-kunlun"
    command.write_text("#!/usr/bin/env bash\nls -l /proc/$$/fd\n")
    assert ".kunlun.lock" not in ready.run("serve").stdout


def test_test_command_adds_the_development_lock_and_passes_arguments_to_pytest(ready: Checkout) -> None:
    assert ready.run("test", "tests/unit", "-k", "x").returncode == 0
    calls = ready.take_calls()
    assert any("dev.txt" in call for call in calls)
    assert calls[-1] == "-m pytest tests/unit -k x"
    ready.run("test", "tests/unit")
    assert ready.installs() == []


def test_help_needs_no_environment(checkout: Checkout) -> None:
    done = checkout.run("--help", PATH="/usr/bin:/bin")
    assert "./kunlun serve" in done.stdout
    assert not checkout.venv.exists()
