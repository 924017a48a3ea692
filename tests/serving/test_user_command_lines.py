"""Command lines that users run, flag for flag, each with a checkpoint of the structure that they were run with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from tests.support.asking import greedy_completion
from tests.support.checkpoints import SMALL, save_checkpoint
from tests.support.demo import demo_checkpoint, demo_reference, stretched
from tests.support.reference import Reference
from tests.support.server import LiveServer

LONG = 40960
"""The context that Qwen3-8B says it was trained on."""

QWEN3_8B = (
    "--gpu-memory-utilization 0.97 --trust-remote-code --max-model-len 8192 --tensor-parallel-size 1 "
    "--dtype float16 --max_num_seqs 8 --max_num_batched_tokens 8192 --block-size 64 --no-enable-chunked-prefill "
    "--distributed-executor-backend mp --no-enable-prefix-caching"
)
QUICK_START = (
    "--host 0.0.0.0 --gpu-memory-utilization 0.9 --trust-remote-code --max-model-len 32768 "
    "--tensor-parallel-size 1 --dtype float16 --max_num_seqs 128 --max_num_batched_tokens 32768 --block-size 128 "
    "--no-enable-prefix-caching --no-enable-chunked-prefill --distributed-executor-backend mp "
    "--served-model-name NAME"
)
REUSE = "--enable-prefix-caching --enable-chunked-prefill"


def with_reuse(flags: str) -> str:
    """The same command line with prefix caching and chunked prefill on, steps small enough to need chunks."""
    kept = [part for part in flags.split() if part not in {"--no-enable-prefix-caching", "--no-enable-chunked-prefill"}]
    if "--max_num_batched_tokens" in kept:
        kept[kept.index("--max_num_batched_tokens") + 1] = "128"
    return " ".join([*kept, REUSE])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's structure, tiny, with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3")
    vocab = demo_reference().model.config.vocab_size
    config = Qwen3Config(**{**SMALL, "vocab_size": vocab, "max_position_embeddings": LONG}, head_dim=128)
    save_checkpoint(config, folder)
    for file in demo_checkpoint().glob("tokenizer*"):
        (folder / file.name).symlink_to(file)
    return folder


def logprob_errors(server: LiveServer, reference: Reference, prompt: list[int]) -> float:
    """Relative L2 of a greedy completion's logprobs against float32."""
    body = {"model": server.name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    asked = {**body, "logprobs": 0, "return_token_ids": True}
    choice = server.post("/v1/completions", asked).json()["choices"][0]
    tokens = choice["token_ids"]
    expected = reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    given = torch.tensor(choice["logprobs"]["token_logprobs"])
    return float((given - expected).norm() / expected.norm())


QWEN3_TOLERANCE = {"plain": 0.06, "float16": 0.01}
"""Relative L2 of logprobs; plain serves float32 weights in bfloat16."""


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="plain"),
        pytest.param(QWEN3_8B, id="qwen3-8b"),
        pytest.param(REUSE, id="plain-reuse", marks=pytest.mark.slow),
        pytest.param(with_reuse(QWEN3_8B), id="qwen3-8b-reuse", marks=pytest.mark.slow),
    ],
)
def test_qwen3_command_lines(qwen3: Path, tmp_path: Path, flags: str) -> None:
    server = LiveServer(qwen3, flags.split(), tmp_path / "log", entry="vllm")
    try:
        tolerance = QWEN3_TOLERANCE["float16" if "float16" in flags else "plain"]
        reference = Reference(qwen3)
        prompt = [(7 * number) % 40_000 + 1000 for number in range(300)]
        assert logprob_errors(server, reference, prompt) < tolerance
        assert logprob_errors(server, reference, prompt) < tolerance
        assert len(greedy_completion(server, prompt[:5], 200)) == 200
        server.stop_cleanly()
    finally:
        server.kill()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(with_reuse(QUICK_START), id="quick-start-reuse"),
        pytest.param(QUICK_START, id="quick-start", marks=pytest.mark.slow),
    ],
)
def test_the_quick_start_answers(tmp_path: Path, flags: str) -> None:
    checkpoint = stretched(demo_checkpoint(), tmp_path / "model", LONG)
    server = LiveServer(checkpoint, flags.split(), tmp_path / "log", entry="module", name="NAME")
    try:
        answer = server.client.chat.completions.create(
            model="NAME", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        reference = demo_reference()
        assert logprob_errors(server, reference, reference.encode("The list goes on. " * 60)) < 0.02
        server.stop_cleanly()
    finally:
        server.kill()
