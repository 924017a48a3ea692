"""A server that is told to end while its engine starts ends at once, without a traceback."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.server import LiveServer

FLAGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "100000000", "--distributed-executor-backend"]
ENGINE_STARTS, MODEL_LOADS = "Initializing a V1 LLM engine", "Starting to load model"


@pytest.mark.parametrize(
    ("entry", "executor", "until", "ending"),
    [
        ("vllm-kunlun", "uni", MODEL_LOADS, signal.SIGTERM),
        ("vllm", "uni", ENGINE_STARTS, signal.SIGINT),
        pytest.param("vllm", "mp", MODEL_LOADS, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("vllm-kunlun", "mp", ENGINE_STARTS, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signal_during_the_start_ends_the_server(
    checkpoint: Path, tmp_path: Path, entry: str, executor: str, until: str, ending: signal.Signals
) -> None:
    server = LiveServer(checkpoint, [*FLAGS, executor], tmp_path / "log", entry=entry, until=until)
    try:
        server.stop_cleanly(ending, expected=128 + ending)
        assert "Application startup complete" not in server.text()
    finally:
        server.kill()
