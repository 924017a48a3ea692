"""What can be refused before vLLM is imported, which takes seconds: one small check per concern.

Each check takes the request and raises CommandError. What is not checked here vLLM or the platform refuses later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from vllm_kunlun.cli import checkpoint
from vllm_kunlun.cli.command_line import CommandLine
from vllm_kunlun.cli.screen import CommandError
from vllm_kunlun.platforms.probe import TargetChoice
from vllm_kunlun.targets.p800 import environment

HOST_DTYPES = ("bfloat16", "float16", "float32")
_LAST_PORT = 65535
_DTYPE_WORDS = ("auto", "half", "float", *HOST_DTYPES)


@dataclass(frozen=True)
class Request:
    """A server that is to be started: what the user typed, the model, and the chosen target."""

    command: CommandLine
    model: str
    choice: TargetChoice


Check = Callable[[Request], None]


def model_exists(request: Request) -> None:
    """Refuse a path that is not there, and a file or folder without a checkpoint; names on a model hub pass."""
    path = Path(request.model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise CommandError(f"the folder {path} holds no checkpoint: there is no config.json in it")
    elif path.is_file() and path.suffix != ".gguf":
        raise CommandError(f"{path} is a file. Give the folder of a checkpoint: the one with config.json in it")
    elif not path.exists() and _looks_like_a_path(request.model):
        hint = _nearest_existing(path)
        raise CommandError(f"there is no model at {request.model}{hint}. Give the folder of a checkpoint")


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or model.endswith(("/", ".gguf"))


def _nearest_existing(path: Path) -> str:
    parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))[:5]
    return f" ({parent} holds: {', '.join(names)})" if names else f" ({parent} is the last folder that exists)"


def hub_model_is_reachable(request: Request) -> None:
    """Refuse the name of a hub's model that is not in the local cache where the hub cannot be reached."""
    if Path(request.model).exists() or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / f"models--{request.model.replace('/', '--')}").is_dir():
        return
    unreachable = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unresolved(constants.ENDPOINT)
    if unreachable:
        raise CommandError(
            f"{request.model} is neither a folder here nor in the model cache {constants.HF_HUB_CACHE}, and "
            f"{unreachable}, so that it cannot be downloaded. Give the folder of a checkpoint"
        )


def _why_unresolved(endpoint: str) -> str | None:
    """Say why the hub's address cannot be looked up; None when it can, or when a proxy does it."""
    if getproxies():
        return None
    name = urlsplit(endpoint).hostname or endpoint
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"the model hub {name} is not known to this network ({error.strerror})"
    return None


def port_is_free(request: Request) -> None:
    """Refuse an address that another server listens on, and a port that cannot be."""
    command = request.command
    port = command.value("--port")
    if command.has("--uds", "--headless") or port is None or not port.isdecimal():
        return
    if int(port) > _LAST_PORT:
        raise CommandError(f"--port {port} is no port: choose one from 1 to {_LAST_PORT}")
    host = command.value("--host") or "0.0.0.0"
    try:
        _try_bind(host, int(port))
    except OSError as error:
        raise CommandError(
            f"the server cannot listen on {host}, port {port}: {error.strerror or error}. "
            "Stop what uses it, or choose another with --port (and --host)"
        ) from error


def _try_bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def ranks_fit_cpus(request: Request) -> None:
    """Refuse more ranks than this process may use CPUs; each rank needs one."""
    command = request.command
    sizes = [
        _positive(command, "--tensor-parallel-size", "-tp"),
        _positive(command, "--pipeline-parallel-size", "-pp"),
    ]
    ranks = sizes[0] * sizes[1]
    cpus = len(os.sched_getaffinity(0))
    if request.choice.target == "host" and ranks > cpus and _positive(command, "--nnodes", "-n") == 1:
        raise CommandError(
            f"--tensor-parallel-size {sizes[0]} x --pipeline-parallel-size {sizes[1]} = {ranks} ranks need {ranks} "
            f"CPUs; this process may use {cpus}. Lower --tensor-parallel-size to {cpus} or less"
        )


def _positive(command: CommandLine, *names: str) -> int:
    text = command.value(*names) or "1"
    return int(text) if text.isdecimal() else 1


def dtype_is_supported(request: Request) -> None:
    """Refuse a dtype the host target does not compute in, asked for by flag or by the checkpoint."""
    if request.choice.target != "host":
        return
    asked = request.command.value("--dtype") or "auto"
    if asked not in _DTYPE_WORDS:
        raise CommandError(f"--dtype {asked} is not supported. Choose one of: {', '.join(_DTYPE_WORDS)}")
    stored = checkpoint.stored_dtype(checkpoint.read_config(request.model))
    if asked == "auto" and stored is not None and stored not in HOST_DTYPES:
        raise CommandError(
            f"the weights of {request.model} are {stored}, which the host target does not compute in. "
            f"Choose what they are converted to with --dtype: {', '.join(HOST_DTYPES)}"
        )


def weights_are_not_fp8(request: Request) -> None:
    """Refuse 8-bit floating-point weights, asked for by flag or by the checkpoint."""
    if request.choice.target != "host":
        return
    asked = request.command.value("--quantization", "-q") or ""
    if "fp8" in asked:
        raise CommandError(f"--quantization {asked} is not supported: the host target has no fp8 kernels")
    if checkpoint.has_fp8_weights(checkpoint.read_config(request.model)):
        raise CommandError(
            f"the weights of {request.model} are fp8, for which the host target has no kernels. "
            "Choose a bfloat16, float16 or float32 checkpoint of this model"
        )


def vendor_variables_can_work(request: Request) -> None:
    """Refuse what the vendor's libraries cannot work with."""
    problem = environment.problem(os.environ) if request.choice.target in ("p800", "emulated") else None
    if problem is not None:
        raise CommandError(problem)


CHECKS: tuple[Check, ...] = (
    model_exists,
    vendor_variables_can_work,
    ranks_fit_cpus,
    dtype_is_supported,
    weights_are_not_fp8,
    port_is_free,
    hub_model_is_reachable,  # last: it may ask the network
)
