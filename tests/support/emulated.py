"""Engines of the target emulated, one after another in a process of their own: a process has one vLLM platform."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_kunlun.targets.p800 import environment

ANSWER_TIMEOUT_S = 240


@dataclass(frozen=True)
class Job:
    """An engine and what it is asked. `settings` are the emulator's variables without their common beginning.

    `guarded`: a step that waits for the device is an error. `watched`: what the last step launches is listed.
    """

    checkpoint: Path
    batches: Sequence[Sequence[Sequence[int]]]
    num_tokens: int = 6
    flags: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    guarded: bool = False
    watched: bool = False


@dataclass
class Outcome:
    """Tokens by batch and prompt. `graphs`: captured sizes and how often any was replayed; `log`: vLLM's messages.

    `padding_is_finite`: whether no graph that was replayed left garbage in its output. `error`: why there is nothing.
    `launches`, `syncs`: of the model in the last step, if watched.
    """

    tokens: list[list[list[int]]] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    replays: int = 0
    padding_is_finite: bool = True
    launches: list[str] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    log: str = ""
    error: str | None = None


class EmulatedEngines:
    """Runs jobs in a child process."""

    def __init__(self) -> None:
        self._connection, child = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        # Not a daemon: those may not start the workers of several ranks.
        self._process = context.Process(target=_serve, args=(child,))
        self._process.start()
        child.close()

    def run(self, job: Job) -> Outcome:
        """Start the job's engine, generate, and take it down again."""
        outcome = self.attempt(job)
        assert outcome.error is None, outcome.error
        return outcome

    def attempt(self, job: Job) -> Outcome:
        """As `run`, for an engine that may not start."""
        self._connection.send(job)
        assert self._connection.poll(ANSWER_TIMEOUT_S), f"no answer after {ANSWER_TIMEOUT_S} s"
        return self._connection.recv()

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Launches:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def on_call(self, call: Any, result: Any) -> None:
        self.kinds[call.kind] += 1

    def on_sync(self, name: str) -> None:
        pass


def _serve(connection: Connection) -> None:
    os.environ["VLLM_KUNLUN_TARGET"] = "emulated"
    for name in environment.VISIBLE:  # this process's parent may have hidden its cards for the host target
        os.environ.pop(name, None)
    with contextlib.suppress(EOFError):  # the parent has gone
        while True:
            connection.send(_outcome(connection.recv()))


def _outcome(job: Job) -> Outcome:
    messages = _Messages()
    outcome = Outcome()
    _play(job.settings)
    logging.getLogger("vllm").addHandler(messages)
    try:
        _run(job, outcome)
    except Exception as error:  # noqa: BLE001  the parent process decides what to do about it
        outcome.error = f"{type(error).__name__}: {error}"
    logging.getLogger("vllm").removeHandler(messages)
    outcome.log = "\n".join(messages.lines)
    return outcome


def _play(settings: Mapping[str, str]) -> None:
    """Makes the emulator another stack. A server has one for its whole life."""
    from vllm.platforms import current_platform

    from vllm_kunlun import emulator, ops

    for name in ("GENERATION", "FAULTS", "MISSING"):
        os.environ.pop(f"VLLM_KUNLUN_EMULATOR_{name}", None)
    os.environ.update({f"VLLM_KUNLUN_EMULATOR_{name}": value for name, value in settings.items()})
    assert current_platform.profile.target == "emulated"
    emulator.uninstall()
    emulator.install()
    ops.activate.cache_clear()


def _run(job: Job, outcome: Outcome) -> None:
    from tests.support.engine import engine, generate, greedy
    from vllm_kunlun.emulator import runtime

    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "gpu_memory_utilization": 0.5}
    parameters = greedy(job.num_tokens, detokenize=False, **job.sampling)
    launches = _Launches()
    with engine(job.checkpoint, **{**options, **job.flags}) as llm, runtime.observed_by(launches):
        runner = _runner(llm)
        if job.guarded:
            _guard(runner)
        if job.watched:
            _watch(runner, outcome)
        launches.kinds.clear()
        outcome.tokens = [generate(llm, batch, parameters) for batch in job.batches]
        outcome.replays = launches.kinds["graph"]
        if runner is not None:
            _look_at_graphs(runner.model, outcome)


def _runner(llm: Any) -> Any:
    """The model runner; None where the ranks are processes of their own."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner if hasattr(executor, "driver_worker") else None


def _guard(runner: Any) -> None:
    """Nothing in the model may wait for the device."""
    from vllm_kunlun import emulator

    forward = runner._model_forward

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with emulator.guard():
            return forward(*args, **kwargs)

    runner._model_forward = guarded


def _watch(runner: Any, outcome: Outcome) -> None:
    from vllm_kunlun import emulator

    forward = runner._model_forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with emulator.launches() as record:
            result = forward(*args, **kwargs)
        outcome.launches, outcome.syncs = record.names, record.syncs
        return result

    runner._model_forward = watched


def _look_at_graphs(model: Any, outcome: Outcome) -> None:
    entries = getattr(model, "concrete_cudagraph_entries", {}) if hasattr(model, "unwrap") else {}
    outcome.graphs = sorted(batch.num_tokens for batch in entries)
    # A graph that was never replayed still has its poison, all of it.
    outputs = [entry.output for entry in entries.values()]
    outcome.padding_is_finite = all(output.isfinite().all() or output.isnan().all() for output in outputs)
