"""Chat, completions and streaming give the model's own greedy text."""

from __future__ import annotations

import json
import subprocess

import httpx
import openai
import psutil
import pytest

from tests.support.asking import QUESTIONS, assert_answers
from tests.support.reference import TextReference
from tests.support.server import LiveServer

PROMPT = "The three primary colours are"


@pytest.mark.parametrize("question", QUESTIONS)
def test_chat_answers_as_the_model_does(client: openai.OpenAI, reference: TextReference, question: str) -> None:
    prompt = reference.chat(question)
    answer = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=32
    )
    expected = reference.until_end(prompt, 32)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == reference.text(expected)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


def test_completion_continues_the_prompt(client: openai.OpenAI, reference: TextReference) -> None:
    answer = client.completions.create(
        model="model", prompt=PROMPT, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    expected = reference.greedy(reference.encode(PROMPT), 24).tokens
    assert answer.choices[0].text == reference.text(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_streamed_completion_arrives_in_pieces_that_add_up(client: openai.OpenAI, reference: TextReference) -> None:
    stream = client.completions.create(
        model="model",
        prompt=PROMPT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == reference.text(reference.greedy(reference.encode(PROMPT), 24).tokens)
    assert len(pieces) > 10
    assert chunks[-1].usage.completion_tokens == 24


def test_streamed_chat_arrives_in_pieces_that_add_up(client: openai.OpenAI, reference: TextReference) -> None:
    stream = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=32, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == reference.text(reference.until_end(reference.chat(QUESTIONS[0]), 32))
    assert chunks[0].delta.role == "assistant"
    assert chunks[-1].finish_reason in {"stop", "length"}


def test_curl_gets_a_chat_answer(server: LiveServer, reference: TextReference) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0}
    command = ["curl", "-sS", "--fail", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(
        [*command, f"{server.url}/v1/chat/completions"], capture_output=True, text=True, timeout=120, check=True
    )
    content = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert "Paris" in content


def test_a_batch_of_prompts_in_one_request(client: openai.OpenAI, reference: TextReference) -> None:
    prompts = [f"{question} Answer:" for question in QUESTIONS]
    answer = client.completions.create(
        model="model", prompt=prompts, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    expected = [reference.text(reference.greedy(reference.encode(prompt), 8).tokens) for prompt in prompts]
    assert [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)] == expected


def test_a_prompt_longer_than_one_step_comes_in_chunks(server: LiveServer, reference: TextReference) -> None:
    prompt = "".join(f"Line {number}: the number after {number} is {number + 1}.\n" for number in range(40))
    assert len(reference.encode(prompt)) > 2 * 256
    assert_answers(server, reference, prompt + "Line 40:")
    assert_answers(server, reference, prompt + "Line 40:")


def test_tokenize_and_detokenize(server: LiveServer, reference: TextReference) -> None:
    tokens = reference.encode(PROMPT)
    counted = server.post("/tokenize", {"model": "model", "prompt": PROMPT}).json()
    assert counted["tokens"] == tokens
    assert counted["count"] == len(tokens)
    assert server.post("/detokenize", {"model": "model", "tokens": tokens}).json()["prompt"] == PROMPT


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["model"]


def test_metrics_count_tokens_and_requests(server: LiveServer, reference: TextReference) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    before = [server.metric(name) for name in names]
    prompt = "Metrics count"
    response = server.post(
        "/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    )
    assert response.status_code == 200
    after = [server.metric(name) for name in names]
    grown = [late - early for late, early in zip(after, before, strict=True)]
    assert grown == [7, len(reference.encode(prompt)), 1]


def test_health_and_version(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/version").json()["version"]


def test_kernels_have_precedence_over_the_server(server: LiveServer) -> None:
    own = psutil.Process().nice()
    engine = max(server.descendants(), key=lambda process: process.memory_info().rss)
    assert psutil.Process(server.process.pid).nice() == min(own + 15, 19)
    assert engine.nice() == own
