"""A bad request is refused with the right status, and the server goes on to answer right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import MAX_MODEL_LEN
from tests.support.asking import assert_answers
from tests.support.reference import TextReference
from tests.support.server import LiveServer


@pytest.fixture(autouse=True)
def still_answers(server: LiveServer, reference: TextReference) -> Iterator[None]:
    yield
    assert_answers(server, reference)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_json_is_400(server: LiveServer, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=b'{"model": "model", ', headers=headers, timeout=30)
    assert response.status_code == 400, response.text
    assert "json" in response.text.lower()


def test_a_prompt_longer_than_the_model_is_400(server: LiveServer) -> None:
    body = {"model": "model", "prompt": [1000] * (MAX_MODEL_LEN + 1), "max_tokens": 1}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert str(MAX_MODEL_LEN) in response.text


def test_a_chat_longer_than_the_model_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.chat.completions.create(model="model", messages=[{"role": "user", "content": "word " * 4000}])


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")


def test_an_unknown_path_is_404(server: LiveServer) -> None:
    assert server.post("/v1/nothing", {}).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -5},
        {"min_p": 2},
        {"max_tokens": -1},
        {"n": 0},
        {"logprobs": 1000},
        {"presence_penalty": 5},
        {"logit_bias": {"99999999": 1}},
        {"prompt": [99_999_999]},
        {"prompt": []},
        {"structured_outputs": {"regex": "(["}},
        {"max_tokens": "many"},
    ],
    ids=str,
)
def test_a_wrong_parameter_is_400(server: LiveServer, wrong: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"model": "model", "prompt": "x", "max_tokens": 4, **wrong})
    assert response.status_code == 400, (response.status_code, response.text)
    assert response.json()["error"]["message"]
