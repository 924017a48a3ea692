"""The patch ledger: it refuses what is not there, and each entry's test fails once the entry can be deleted."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.envs
import zmq
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.exceptions import EngineDeadError

import vllm_kunlun
from vllm_kunlun.platforms.envs import VARIABLES
from vllm_kunlun.upstream import interruption, ledger, patches


def test_missing_target_is_refused() -> None:
    patch = replace(patches.EMPTY_CACHE, target="torch:accelerator.no_such_function")
    with pytest.raises(ledger.PatchTargetMissing, match=r"no_such_function is missing in torch"):
        ledger.apply(patch)


def test_patch_for_another_version_is_not_applied() -> None:
    patch = replace(patches.EMPTY_CACHE, target="torch:accelerator.current_device_index", versions="<0.1")
    before = torch.accelerator.current_device_index
    ledger.apply(patch)
    assert torch.accelerator.current_device_index is before


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.target)
def test_every_entry_names_a_test_that_exists(patch: ledger.Patch) -> None:
    file, _, name = patch.test.partition("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert callable(getattr(module, name))
    assert patch.reason


@pytest.mark.parametrize("patch", [patches.EMPTY_CACHE, patches.SYNCHRONIZE], ids=lambda patch: patch.target)
def test_accelerator_calls_still_fail_without_accelerator(patch: ledger.Patch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(RuntimeError, match="accelerator"):
        ledger.original(patch)()


def test_slot_mapping_kernel_still_needs_triton() -> None:
    from vllm.v1.worker import block_table

    assert "@triton.jit" in inspect.getsource(block_table)
    assert hasattr(block_table, "_compute_slot_mapping_kernel")


def swallow_or_raise(context) -> None:
    with context:
        raise KeyboardInterrupt("terminated")


def test_start_socket_still_swallows_an_interrupt(tmp_path: Path) -> None:
    swallow_or_raise(ledger.original(patches.START_SOCKET)(f"ipc://{tmp_path}/a", zmq.PULL, bind=True))


def test_start_socket_lets_an_interrupt_out_and_closes(tmp_path: Path) -> None:
    wrapped = patches.START_SOCKET.make(ledger.original(patches.START_SOCKET))
    sockets = []
    with pytest.raises(KeyboardInterrupt, match="terminated"), wrapped(f"ipc://{tmp_path}/a", zmq.PULL) as socket:
        sockets.append(socket)
        raise KeyboardInterrupt("terminated")
    assert sockets[0].closed
    with pytest.raises(ValueError, match="other"), wrapped(f"ipc://{tmp_path}/a", zmq.PULL):
        raise ValueError("other")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[KeyboardInterrupt], argparse.Namespace]:
    """Makes the server's coroutine raise the interrupt; gives the arguments for the command."""

    def prepare(interrupt: KeyboardInterrupt) -> argparse.Namespace:
        async def run_server(args: argparse.Namespace) -> None:
            raise interrupt

        monkeypatch.setattr("vllm.entrypoints.cli.serve.run_server", run_server)
        return make_arg_parser(FlexibleArgumentParser()).parse_args(["model"])

    monkeypatch.setattr(signal, "getsignal", lambda number: None)  # the test keeps its own handler
    return prepare


def test_serve_command_still_lets_an_interrupt_out(interrupted) -> None:
    with pytest.raises(KeyboardInterrupt):
        ledger.original(patches.SERVE_COMMAND)(interrupted(KeyboardInterrupt("terminated")))


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt("terminated"), 143), (KeyboardInterrupt(), 130)])
def test_serve_command_leaves_with_the_signals_code(interrupted, interrupt: KeyboardInterrupt, code: int) -> None:
    command = patches.SERVE_COMMAND.make(ledger.original(patches.SERVE_COMMAND)).__func__
    with pytest.raises(SystemExit) as end:
        command(interrupted(interrupt))
    assert end.value.code == code


class EndedClient:
    """As a client whose shutdown cancelled the task that reads from the engine."""

    resources = SimpleNamespace(engine_dead=True)
    _format_exception = MPClient._format_exception

    def __init__(self, ordered: bool) -> None:
        self.outputs_queue: asyncio.Queue[Exception] = asyncio.Queue()
        self.outputs_queue.put_nowait(EngineDeadError())
        self._finalizer = SimpleNamespace(alive=not ordered)

    def _ensure_output_queue_task(self) -> None: ...


def reported(get_output, ordered: bool) -> list[logging.LogRecord]:
    """What output_handler of AsyncLLM logs, after the filter."""
    records: list[logging.LogRecord] = []
    logger = logging.Logger("test")
    logger.addFilter(interruption.is_news)
    logger.addHandler(handler := logging.Handler())
    handler.emit = records.append
    try:
        asyncio.run(get_output(EndedClient(ordered)))
    except EngineDeadError:
        logger.exception("AsyncLLM output_handler failed.")
    return records


def test_client_still_reports_the_end_it_ordered_as_a_loss() -> None:
    assert len(reported(ledger.original(patches.ENGINE_OUTPUT), ordered=True)) == 1


@pytest.mark.parametrize(("ordered", "count"), [(True, 0), (False, 1)])
def test_only_the_loss_of_an_engine_that_should_run_is_reported(ordered: bool, count: int) -> None:
    patched = patches.ENGINE_OUTPUT.make(ledger.original(patches.ENGINE_OUTPUT))
    assert len(reported(patched, ordered)) == count


def test_vllm_still_serves_at_the_priority_it_was_started_with() -> None:
    launcher, server = (
        importlib.import_module(f"vllm.entrypoints.{name}") for name in ("launcher", "openai.api_server")
    )
    sources = inspect.getsource(launcher) + inspect.getsource(server)
    assert "serve_http(" in sources
    assert not [word for word in ("os.nice", "setpriority", "sched_set") if word in sources]


def test_server_runs_behind_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve_http(app: str, *, port: int) -> tuple[str, int, int]:
        return app, port, os.getpriority(os.PRIO_PROCESS, 0)

    def in_a_thread() -> tuple[str, int, int]:
        return asyncio.run(patches.SERVE_HTTP.make(serve_http)("app", port=7))

    monkeypatch.setenv("VLLM_KUNLUN_SERVER_NICE", "3")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_a_thread).result() == ("app", 7, min(before + 3, 19))
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_vllm_still_warns_of_variables_that_plugins_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "environment_variables", ledger.original(patches.KNOWN_VARIABLES))
    monkeypatch.setenv("VLLM_KUNLUN_TARGET", "host")
    with pytest.raises(ValueError, match="VLLM_KUNLUN_TARGET"):
        vllm.envs.validate_environ(hard_fail=True)


def test_vllm_knows_every_variable_of_an_inactive_plugin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kunlun, "_is_platform_ours", lambda: False)
    vllm_kunlun.register_model()
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "1")
    vllm.envs.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_KUNLUN_TARGTE", "host")
    with pytest.raises(ValueError, match="VLLM_KUNLUN_TARGTE"):
        vllm.envs.validate_environ(hard_fail=True)
