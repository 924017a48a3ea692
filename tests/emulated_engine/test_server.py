"""`vllm-kunlun serve` with the target emulated: every process of the server has the emulator."""

from __future__ import annotations

from pathlib import Path

from tests.support.demo import demo_checkpoint, demo_reference
from tests.support.server import LiveServer

FLAGS = [
    *("--dtype", "float32"),
    *("--max-model-len", "128"),
    *("--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "64"),
    *("--gpu-memory-utilization", "0.5"),
]
QUESTION = "What is the capital of France?"


def test_the_server_answers_as_the_model_does(tmp_path: Path) -> None:
    """Memory for the KV cache is measured on the emulated card, as on a real one."""
    reference = demo_reference()
    server = LiveServer(demo_checkpoint(), FLAGS, tmp_path / "log", env={"VLLM_KUNLUN_TARGET": "emulated"})
    try:
        answer = server.client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=8
        )
        expected = reference.until_end(reference.chat(QUESTION), 8)
        assert answer.choices[0].message.content == reference.text(expected)
        sampled = server.client.completions.create(
            model="model", prompt="Once upon a time", max_tokens=4, seed=7, top_p=0.9, n=2,
            presence_penalty=0.5, extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        )  # fmt: skip
        assert len(sampled.choices) == 2
        chosen = server.client.completions.create(
            model="model",
            prompt="Is water wet? ",
            max_tokens=8,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
        assert chosen.choices[0].text in ("yes", "no")
        log = server.text()
        assert "target emulated" in log
        assert "22 ops by p800 (torch29)" in log
        assert "Graph capturing finished" in log
        server.stop_cleanly()
    finally:
        server.kill()
