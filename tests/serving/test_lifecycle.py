"""Starting, ending and losing a process, with both executors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.asking import assert_answers
from tests.support.reference import TextReference
from tests.support.server import LiveServer

FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "200000000"]
EXECUTORS = ["uni", "mp"]


def start(checkpoint: Path, tmp_path: Path, executor: str, *flags: str, **options: Any) -> LiveServer:
    chosen = ["--distributed-executor-backend", executor]
    return LiveServer(checkpoint, [*FLAGS, *chosen, *flags], tmp_path / "log", **options)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_serves_and_ends_without_a_traceback(
    checkpoint: Path, reference: TextReference, tmp_path: Path, executor: str
) -> None:
    server = start(checkpoint, tmp_path, executor)
    try:
        assert_answers(server, reference)
        assert "environment variable detected: VLLM_KUNLUN" not in server.text()
        server.stop_cleanly()
    finally:
        server.kill()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sigterm_lets_a_request_in_flight_end(checkpoint: Path, tmp_path: Path, executor: str) -> None:
    """The stream ends by itself, complete or cut short with an error event; nothing hangs, nothing is left behind."""
    server = start(checkpoint, tmp_path, executor, "--shutdown-timeout", "60")
    try:
        tokens, ended = [], threading.Event()

        def read() -> None:
            stream = server.client.completions.create(
                model="model", prompt="A story:", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            tokens.extend(chunk.choices[0].text for chunk in stream)
            ended.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while len(tokens) < 3:
            time.sleep(0.02)
        server.stop_cleanly()
        assert ended.wait(5), "the request in flight was cut off"
        assert len(tokens) >= 290
    finally:
        server.kill()


def engine_processes(server: LiveServer, name: str) -> list[psutil.Process]:
    return [process for process in server.descendants() if name in " ".join(process.cmdline())]


@pytest.mark.parametrize(
    ("executor", "victim"),
    [
        ("uni", "EngineCore"),
        ("mp", "Worker"),
        ("mp", "EngineCore"),
    ],
)
def test_a_killed_process_ends_the_server_with_a_message(
    checkpoint: Path, tmp_path: Path, executor: str, victim: str
) -> None:
    server = start(checkpoint, tmp_path, executor)
    try:
        children = server.descendants()
        (process,) = engine_processes(server, victim)
        process.send_signal(signal.SIGKILL)
        assert server.process.wait(60) != 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"processes left behind: {alive}"
        log = server.text().lower()
        assert "died" in log, server.tail()
    finally:
        server.kill()


@pytest.mark.parametrize("entry", ["vllm-kunlun", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_killed_server_leaves_no_process_and_no_port(checkpoint: Path, tmp_path: Path, entry: str) -> None:
    server = start(checkpoint, tmp_path, "mp", entry=entry)
    try:
        children = server.descendants()
        server.process.kill()
        server.process.wait(10)
        with socket.create_server(("127.0.0.1", server.port)):
            _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"processes left behind: {alive}"
    finally:
        server.kill()


OFFLINE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=100_000_000,
        distributed_executor_backend=sys.argv[2],
    )
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    print("TEXT:", repr(llm.generate(["The capital of France is"], greedy, use_tqdm=False)[0].outputs[0].text))
"""


@pytest.mark.parametrize(
    ("executor", "multiprocessing"),
    [
        ("uni", "0"),
        ("mp", "1"),
        pytest.param("uni", "1", marks=pytest.mark.slow),
        pytest.param("mp", "0", marks=pytest.mark.slow),
    ],
)
def test_offline_llm_answers_and_ends_cleanly(
    checkpoint: Path, reference: TextReference, tmp_path: Path, executor: str, multiprocessing: str
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    env = {**os.environ, "VLLM_KUNLUN_TARGET": "host", "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing}
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint), executor],
        env=env, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    expected = reference.text(reference.greedy(reference.encode("The capital of France is"), 12).tokens)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert f"TEXT: {expected!r}" in done.stdout
    assert "Traceback (most recent call last)" not in output, output[output.index("Traceback") :][:4000]
