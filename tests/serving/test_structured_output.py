"""Structured output keeps to its choice, pattern, schema or grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

QUESTION = [{"role": "user", "content": "Describe a person. Use few words."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["adult", "child"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def answer(client: openai.OpenAI, temperature: float = 0.0, max_tokens: int = 64, **extra: Any) -> str:
    given = client.chat.completions.create(
        model="model", messages=QUESTION, temperature=temperature, max_tokens=max_tokens, seed=1, **extra
    )
    return given.choices[0].message.content


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choice(client: openai.OpenAI, temperature: float) -> None:
    extra = {"structured_outputs": {"choice": ["positive", "negative"]}}
    assert answer(client, temperature, extra_body=extra) in {"positive", "negative"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex(client: openai.OpenAI, temperature: float) -> None:
    pattern = r"[A-Z][a-z]{2,8} is [0-9]{1,3} years old\."
    text = answer(client, temperature, extra_body={"structured_outputs": {"regex": pattern}})
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(client: openai.OpenAI, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    person = json.loads(answer(client, temperature, response_format=wanted))
    assert set(person) == {"name", "age", "kind"}
    assert isinstance(person["age"], int)
    assert person["kind"] in {"adult", "child"}


def test_grammar(client: openai.OpenAI) -> None:
    grammar = 'root ::= "yes " number\nnumber ::= [0-9] [0-9]'
    text = answer(client, extra_body={"structured_outputs": {"grammar": grammar}})
    assert re.fullmatch(r"yes [0-9][0-9]", text), text


def test_json_schema_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="model",
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert set(json.loads(text)) == {"name", "age", "kind"}


def test_structured_and_free_requests_share_a_batch(client: openai.OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    extra = {"structured_outputs": {"choice": ["left", "right"]}}
    with ThreadPoolExecutor(6) as pool:
        bound = [pool.submit(answer, client, 1.0, 64, extra_body=extra) for _ in range(3)]
        free = [pool.submit(answer, client, 0.0, 24) for _ in range(3)]
        assert {future.result() for future in bound} <= {"left", "right"}
        assert len({future.result() for future in free}) == 1
