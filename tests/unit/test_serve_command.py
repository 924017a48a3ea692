"""`vllm-kunlun serve`: defaults, checks before vLLM is imported, and errors."""

import json
import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from vllm_kunlun.cli import prechecks, serve
from vllm_kunlun.cli.checkpoint import has_fp8_weights, stored_dtype
from vllm_kunlun.cli.command_line import CommandLine
from vllm_kunlun.cli.prechecks import Request
from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.platforms.start_error import ERROR_FILE, ShortStartErrors, StartError

HOST = TargetChoice("host", True, "")
INACTIVE = TargetChoice(None, False, "")
ADDRESS = ("--host", "127.0.0.1", "--port", "8356")


@pytest.fixture(autouse=True)
def demo_model(monkeypatch):
    monkeypatch.setattr(serve, "prepare_demo_model", lambda: (Path("/cache/demo"), "Demo"))


@pytest.fixture
def vllm(monkeypatch):
    """Stand in for vLLM's main function: records the arguments, then does what `end` says."""

    class Vllm:
        arguments = None
        logged = ""
        end = None

    def main():
        Vllm.arguments = sys.argv[1:]
        Path(os.environ[ERROR_FILE]).write_text(Vllm.logged)
        if Vllm.end is not None:
            raise Vllm.end

    monkeypatch.setattr(serve, "_vllm_main", lambda: main)
    monkeypatch.setattr(serve, "current_choice", lambda: HOST)
    monkeypatch.setattr(prechecks, "CHECKS", ())
    monkeypatch.setattr(sys, "argv", ["vllm-kunlun"])
    monkeypatch.setenv(ERROR_FILE, "")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    return Vllm


def request(*arguments, choice=HOST):
    return Request(CommandLine(arguments), arguments[0], choice)


def checkpoint(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "used"), [(None, "fork"), ("spawn", "spawn")])
def test_the_engine_is_forked_unless_the_user_chose(vllm, monkeypatch, chosen, used):
    if chosen is None:
        monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    with pytest.raises(SystemExit):
        serve.serve(("some/model",))
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == used


# --- defaults -----------------------------------------------------------------------------------------------------


def test_without_a_model_the_demo_model_is_served_under_its_name():
    assert serve.complete(CommandLine(())) == (
        "/cache/demo",
        ("/cache/demo", *ADDRESS, "--served-model-name", "Demo"),
    )


def test_users_name_for_the_demo_model_is_kept():
    assert serve.complete(CommandLine(("--served_model_name=x",)))[1] == (
        "/cache/demo",
        *ADDRESS,
        "--served_model_name=x",
    )


def test_flags_pass_through_in_order():
    flags = ("--max-num-seqs", "8", "-tp", "2", "--compilation-config", '{"mode": 0}')
    assert serve.complete(CommandLine(("org/model", *flags)))[1] == ("org/model", *ADDRESS, *flags)


@pytest.mark.parametrize("port", [("--port", "1234"), ("--port=1234",)])
def test_users_port_is_kept(port):
    assert serve.complete(CommandLine(("m", *port)))[1] == ("m", "--host", "127.0.0.1", *port)


def test_users_host_is_kept():
    assert serve.complete(CommandLine(("m", "--host=0.0.0.0")))[1] == ("m", "--port", "8356", "--host=0.0.0.0")


def test_socket_file_needs_no_address():
    assert serve.complete(CommandLine(("m", "--uds", "/run/x")))[1] == ("m", "--uds", "/run/x")


def test_model_and_port_of_a_config_file_are_kept():
    command = CommandLine(("--config", "x.yaml"), {"model": "org/model", "port": 9000})
    assert serve.complete(command) == ("org/model", ("--host", "127.0.0.1", "--config", "x.yaml"))


def test_model_flag_is_kept():
    assert serve.complete(CommandLine(("--model=org/m",))) == ("org/m", (*ADDRESS, "--model=org/m"))


# --- checks before vLLM is imported -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/models/x", "a/b/c", "weights.gguf"])
def test_missing_path_is_refused(model):
    with pytest.raises(CommandError, match="there is no model at"):
        prechecks.model_exists(request(model))


def test_missing_path_names_what_is_beside_it(tmp_path):
    (tmp_path / "Qwen3-8B").mkdir()
    with pytest.raises(CommandError, match=r"holds: Qwen3-8B"):
        prechecks.model_exists(request(str(tmp_path / "Qwen3-8b")))


def test_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CommandError, match=r"no config\.json"):
        prechecks.model_exists(request(str(tmp_path)))


def test_file_in_the_place_of_a_folder_is_refused(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(CommandError, match=r"model\.safetensors is a file\. Give the folder"):
        prechecks.model_exists(request(str(weights)))


@pytest.mark.parametrize("model", ["org/model", "gpt2"])
def test_hub_names_pass(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prechecks.model_exists(request(model))


def test_checkpoint_folder_passes(tmp_path):
    prechecks.model_exists(request(checkpoint(tmp_path)))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(prechecks, "getproxies", dict)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    return constants


def test_hub_name_offline_is_refused_unless_cached(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="HF_HUB_OFFLINE is set"):
        prechecks.hub_model_is_reachable(request("org/model"))
    (tmp_path / "hub/models--org--model").mkdir(parents=True)
    prechecks.hub_model_is_reachable(request("org/model"))


def test_hub_that_is_not_known_to_the_network_is_refused(hub):
    with pytest.raises(CommandError, match=r"hub\.invalid is not known to this network"):
        prechecks.hub_model_is_reachable(request("org/model"))


def test_reachable_hub_is_left_to_vllm(hub, monkeypatch):
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:8080")
    prechecks.hub_model_is_reachable(request("org/model"))


def test_hub_behind_a_proxy_is_left_to_vllm(hub, monkeypatch):
    monkeypatch.setattr(prechecks, "getproxies", lambda: {"https": "http://proxy:3128"})
    prechecks.hub_model_is_reachable(request("org/model"))


def test_folder_needs_no_hub(hub, tmp_path):
    prechecks.hub_model_is_reachable(request(str(tmp_path)))


@pytest.fixture
def used_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield str(server.getsockname()[1])


def test_port_in_use_is_refused(used_port):
    with pytest.raises(CommandError, match=f"port {used_port}.*choose another with --port"):
        prechecks.port_is_free(request("m", "--host", "127.0.0.1", "--port", used_port))


def test_number_that_is_no_port_is_refused():
    with pytest.raises(CommandError, match=r"--port 99999 is no port.*65535"):
        prechecks.port_is_free(request("m", "--host", "127.0.0.1", "--port", "99999"))


def test_port_in_use_does_not_matter_to_a_socket_file(used_port):
    prechecks.port_is_free(request("m", "--port", used_port, "--uds", "/tmp/x"))


def test_unknown_host_is_refused():
    with pytest.raises(CommandError, match="no-such-host"):
        prechecks.port_is_free(request("m", "--host", "no-such-host.invalid", "--port", "18356"))


def test_more_ranks_than_cpus_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    prechecks.ranks_fit_cpus(request("m", "-tp", "2"))
    for flags in (("-tp", "3"), ("--tensor_parallel_size=2", "--pipeline-parallel-size", "2")):
        with pytest.raises(CommandError, match="may use 2"):
            prechecks.ranks_fit_cpus(request("m", *flags))
    prechecks.ranks_fit_cpus(request("m", "-tp", "8", choice=INACTIVE))


@pytest.mark.parametrize("dtype", ["float64", "fp8", "int8"])
def test_dtype_that_no_kernel_takes_is_refused(dtype):
    with pytest.raises(CommandError, match=f"--dtype {dtype} is not supported.*bfloat16"):
        prechecks.dtype_is_supported(request("m", "--dtype", dtype))


@pytest.mark.parametrize("dtype", ["auto", "half", "bfloat16", "float16", "float32", "float"])
def test_dtype_with_kernels_passes(dtype):
    prechecks.dtype_is_supported(request("m", f"--dtype={dtype}"))


def test_checkpoint_in_float64_needs_an_explicit_dtype(tmp_path):
    model = checkpoint(tmp_path, torch_dtype="float64")
    with pytest.raises(CommandError, match=r"are float64.*--dtype"):
        prechecks.dtype_is_supported(request(model))
    prechecks.dtype_is_supported(request(model, "--dtype", "float32"))


@pytest.mark.parametrize(
    ("quantization", "is_fp8"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}},
            },
            True,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}},
            False,
        ),
        ({"quant_method": "awq", "bits": 4}, False),
        (None, False),
    ],
)
def test_fp8_weights_are_recognized(tmp_path, quantization, is_fp8):
    config = {"quantization_config": quantization}
    assert has_fp8_weights(config) is is_fp8
    model = checkpoint(tmp_path, **config)
    if is_fp8:
        with pytest.raises(CommandError, match="are fp8"):
            prechecks.weights_are_not_fp8(request(model))
    else:
        prechecks.weights_are_not_fp8(request(model))


def test_fp8_flag_is_refused():
    with pytest.raises(CommandError, match="--quantization fp8 is not supported"):
        prechecks.weights_are_not_fp8(request("m", "-q", "fp8"))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({}, None),
    ],
)
def test_stored_dtype_is_read_from_every_generation_of_config(config, dtype):
    assert stored_dtype(config) == dtype


def test_broken_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CommandError, match="not valid JSON"):
        prechecks.weights_are_not_fp8(request(str(tmp_path)))


# --- running ------------------------------------------------------------------------------------------------------


def test_vllm_gets_the_completed_command_line(vllm):
    with pytest.raises(SystemExit) as end:
        serve.serve(["org/model", "--max-num-seqs", "8"])
    assert end.value.code == 0
    assert vllm.arguments == ["serve", "org/model", *ADDRESS, "--max-num-seqs", "8"]


def test_log_of_this_process_is_shortened_whenever_vllm_was_imported(vllm, monkeypatch):
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    with pytest.raises(SystemExit):
        serve.serve(["org/model"])
    assert [type(entry) for entry in handler.filters] == [ShortStartErrors]


def test_exit_code_of_vllm_is_kept(vllm):
    vllm.end = SystemExit(7)
    with pytest.raises(SystemExit) as end:
        serve.serve(["org/model"])
    assert end.value.code == 7


@pytest.mark.parametrize(
    "error",
    [StartError("lower --x"), ValueError("lower --x"), OSError("lower --x")],
    ids=lambda error: type(error).__name__,
)
def test_refusal_of_vllm_is_one_line_and_a_code(vllm, capsys, error):
    vllm.end = error
    with pytest.raises(SystemExit) as end:
        serve.serve(["org/model"])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("error: lower --x\n")


@pytest.mark.parametrize(
    ("logged", "shown"), [("no room for the KV cache; lower --x", "no room"), ("", "what it logged above says why")]
)
def test_refusal_of_another_process_is_repeated_at_the_end(vllm, capsys, logged, shown):
    vllm.logged = logged
    vllm.end = RuntimeError("Engine core initialization failed. See root cause above.")
    with pytest.raises(SystemExit) as end:
        serve.serve(["org/model"])
    assert end.value.code == 1
    assert shown in capsys.readouterr().err
    assert not Path(os.environ[ERROR_FILE]).exists()


def test_bug_in_vllm_keeps_its_traceback(vllm):
    vllm.end = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        serve.serve(["org/model"])


def test_debug_level_shows_the_traceback(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    vllm.end = ValueError("lower --x")
    with pytest.raises(ValueError, match="lower --x"):
        serve.serve(["org/model"])


def test_refused_target_stops_before_vllm(vllm, monkeypatch):
    monkeypatch.setattr(serve, "current_choice", lambda: TargetChoice("p800", False, "", "the driver is missing"))
    with pytest.raises(CommandError, match="the driver is missing"):
        serve.serve(["org/model"])
    assert vllm.arguments is None
