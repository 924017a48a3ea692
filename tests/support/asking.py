"""Questions to a running server, and what right answers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.reference import TextReference
from tests.support.server import LiveServer
from tests.support.tokens import assert_greedy

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
)


def greedy_completion(server: LiveServer, prompt: str | Sequence[int], max_tokens: int, **extra: Any) -> list[int]:
    """Token ids of a greedy completion that runs past any end token."""
    body = {
        "model": server.name,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def assert_answers(server: LiveServer, reference: TextReference, prompt: str = "The capital of France is") -> None:
    """A float32 server must still give the reference's tokens."""
    expected = reference.greedy(reference.encode(prompt), 12)
    assert_greedy(greedy_completion(server, prompt, 12), expected, f"{prompt!r}")
