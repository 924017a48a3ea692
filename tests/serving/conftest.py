"""One server of the demo model in float32 for the whole package; tests that need other flags start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.demo import demo_checkpoint, demo_reference
from tests.support.reference import TextReference
from tests.support.server import LiveServer

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16
FLAGS = [
    *("--dtype", "float32"),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-seqs", str(MAX_NUM_SEQS)),
    *("--max-num-batched-tokens", "256"),
    *("--kv-cache-memory-bytes", str(1 << 30)),
]
"""Float32, so that answers can be compared token by token; few batched tokens, so that long prompts come in chunks."""


@pytest.fixture(scope="package")
def checkpoint() -> Path:
    return demo_checkpoint()


@pytest.fixture(scope="package")
def reference() -> TextReference:
    return demo_reference()


@pytest.fixture(scope="package")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    live = LiveServer(checkpoint, FLAGS, tmp_path_factory.mktemp("server") / "log")
    yield live
    live.stop_cleanly()


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return server.client
