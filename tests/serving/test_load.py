"""More requests than the server runs at once, and clients that go away."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest

from tests.serving.conftest import MAX_NUM_SEQS
from tests.support.asking import assert_answers
from tests.support.reference import TextReference
from tests.support.server import LiveServer
from tests.support.tokens import assert_replay

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"


def prompts(count: int) -> list[str]:
    """Prompts of different lengths; some share a beginning, so that cached prefixes are used."""
    return [f"{'The list goes on. ' * (number % 7)}Item {number % 20} of the list is" for number in range(count)]


async def complete(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> list[int]:
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


async def complete_all(url: str, texts: list[str], lengths: list[int]) -> list[list[int]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as client:
        return await asyncio.gather(*(complete(client, *pair) for pair in zip(texts, lengths, strict=True)))


def test_more_requests_than_sequences_are_queued_and_right(server: LiveServer, reference: TextReference) -> None:
    texts = prompts(6 * MAX_NUM_SEQS)
    lengths = [4 + number % 9 for number in range(len(texts))]
    answers = asyncio.run(complete_all(server.url, texts, lengths))
    for text, length, tokens in zip(texts, lengths, answers, strict=True):
        assert len(tokens) == length
        assert_replay(reference, reference.encode(text), tokens, f"{text!r} among {len(texts)}")
    assert server.metric(WAITING) == 0


def wait_until_idle(server: LiveServer, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while server.metric(RUNNING) > 0:
        assert time.monotonic() < deadline, "the request of a client that went away is still running"
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_client_that_disconnects_in_mid_stream_frees_its_place(
    server: LiveServer, client: openai.OpenAI, reference: TextReference, kind: str
) -> None:
    extra = {"ignore_eos": True}
    if kind == "chat":
        messages = [{"role": "user", "content": "Tell a long story."}]
        stream = client.chat.completions.create(
            model="model", messages=messages, max_tokens=900, stream=True, extra_body=extra
        )
    else:
        stream = client.completions.create(
            model="model", prompt="A long story:", max_tokens=900, stream=True, extra_body=extra
        )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.metric(RUNNING) == 1
    stream.close()
    wait_until_idle(server)
    assert_answers(server, reference)


def test_a_client_that_goes_away_before_the_answer_frees_its_place(
    server: LiveServer, reference: TextReference
) -> None:
    body = {"model": "model", "prompt": "A very long story:", "max_tokens": 900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=1.0)
    wait_until_idle(server)
    assert_answers(server, reference)


def test_many_disconnects_at_once(server: LiveServer, reference: TextReference) -> None:
    async def leave_early(client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "model", "prompt": f"Story {number}:", "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _line in response.aiter_lines():
                return

    async def all_leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await asyncio.gather(*(leave_early(client, number) for number in range(2 * MAX_NUM_SEQS)))

    asyncio.run(all_leave())
    wait_until_idle(server)
    assert_answers(server, reference)
