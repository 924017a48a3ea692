"""Every sampling parameter does what it says, alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest
import torch

from tests.support.asking import greedy_completion
from tests.support.reference import TextReference
from tests.support.server import LiveServer
from tests.support.tokens import assert_greedy

PROMPT = "Once upon a time, there was a"


def sample(server: LiveServer, max_tokens: int = 16, **parameters: Any) -> list[int]:
    """Token ids of one sampled completion."""
    return greedy_completion(server, PROMPT, max_tokens, **{"temperature": 1.0, **parameters})


def step_probabilities(reference: TextReference, tokens: Sequence[int]) -> torch.Tensor:
    """What the model gives each token of the vocabulary at each generated position, [num_tokens, vocab]."""
    prompt = reference.encode(PROMPT)
    return reference.logits([*prompt, *tokens])[len(prompt) - 1 : -1].softmax(-1)


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, reference: TextReference) -> None:
    full = reference.text(reference.greedy(reference.encode(PROMPT), 24).tokens)
    stop = full[len(full) // 2 :].split()[1]
    answer = client.completions.create(model="model", prompt=PROMPT, temperature=0, max_tokens=24, stop=[stop])
    assert answer.choices[0].text == full[: full.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_stop_string_can_be_included(client: openai.OpenAI, reference: TextReference) -> None:
    full = reference.text(reference.greedy(reference.encode(PROMPT), 24).tokens)
    stop = full[len(full) // 2 :].split()[1]
    extra = {"include_stop_str_in_output": True}
    answer = client.completions.create(
        model="model", prompt=PROMPT, temperature=0, max_tokens=24, stop=stop, extra_body=extra
    )
    assert answer.choices[0].text == full[: full.index(stop) + len(stop)]


def test_stop_token_ends_the_text(server: LiveServer, reference: TextReference) -> None:
    tokens = reference.greedy(reference.encode(PROMPT), 12).tokens
    stop = tokens[6]
    generated = greedy_completion(server, PROMPT, 12, stop_token_ids=[stop])
    assert generated == tokens[: tokens.index(stop) + 1]


def test_n_gives_that_many_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="model", prompt=PROMPT, n=4, temperature=1.0, max_tokens=16, seed=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


def test_n_chat_choices_stream_with_their_index(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Tell me a word."}],
        n=2,
        temperature=1.0,
        max_tokens=8,
        stream=True,
    )
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def test_logprobs_are_the_models(client: openai.OpenAI, reference: TextReference) -> None:
    answer = client.completions.create(
        model="model",
        prompt=PROMPT,
        temperature=0,
        max_tokens=8,
        logprobs=5,
        extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs.tokens or []]
    expected = step_probabilities(reference, tokens).log()
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs.token_logprobs), chosen, atol=2e-3, rtol=0)
    best = expected.topk(5).indices.tolist()
    for step, given in enumerate(logprobs.top_logprobs or []):
        assert {int(token.removeprefix("token_id:")) for token in given} == set(best[step])


def test_chat_logprobs_come_with_the_best_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Say yes."}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    for token in logprobs.content or []:
        assert token.logprob == max(alternative.logprob for alternative in token.top_logprobs)
        assert len(token.top_logprobs) == 3


def test_prompt_logprobs_are_the_models(server: LiveServer, reference: TextReference) -> None:
    prompt = reference.encode("The quick brown fox jumps over the lazy dog.")
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    given = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert given[0] is None
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(given[1:], prompt[1:], strict=True)]
    expected = reference.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-3, rtol=0)


def test_prompt_logprobs_of_a_prompt_in_chunks(server: LiveServer, reference: TextReference) -> None:
    prompt = reference.encode("".join(f"{number} is followed by {number + 1}. " for number in range(60)))
    assert len(prompt) > 2 * 256
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    given = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(given[1:], prompt[1:], strict=True)]
    expected = reference.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-3, rtol=0)


def test_echo_returns_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="model", prompt=PROMPT, temperature=0, max_tokens=4, echo=True, logprobs=0)
    assert answer.choices[0].text.startswith(PROMPT)


def test_a_seed_reproduces_and_another_differs(server: LiveServer) -> None:
    first, second, other = sample(server, seed=7), sample(server, seed=7), sample(server, seed=8)
    assert first == second
    assert first != other


def test_logit_bias_bans_and_forces(server: LiveServer, reference: TextReference) -> None:
    best = reference.greedy(reference.encode(PROMPT), 1).tokens[0]
    banned = greedy_completion(server, PROMPT, 8, logit_bias={str(best): -100})
    assert banned[0] != best
    forced = greedy_completion(server, PROMPT, 4, logit_bias={"1234": 100})
    assert forced == [1234] * 4


def presence(strength: float) -> Callable[..., torch.Tensor]:
    def adjust(logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        logits[list(set(generated))] -= strength
        return logits

    return adjust


def frequency(strength: float) -> Callable[..., torch.Tensor]:
    def adjust(logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=logits.numel())
        return logits - strength * counts

    return adjust


def repetition(strength: float) -> Callable[..., torch.Tensor]:
    def adjust(logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        seen = list({*prompt, *generated})
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / strength, logits[seen] * strength)
        return logits

    return adjust


@pytest.mark.parametrize(
    ("parameter", "strength", "adjust"),
    [
        ("presence_penalty", 1.5, presence),
        ("frequency_penalty", 1.0, frequency),
        ("repetition_penalty", 1.3, repetition),
    ],
)
def test_penalties_follow_their_formula(
    server: LiveServer, reference: TextReference, parameter: str, strength: float, adjust: Callable[..., Any]
) -> None:
    prompt = "one two one two one two one two"
    expected = reference.greedy(reference.encode(prompt), 20, adjust(strength))
    assert expected.tokens != reference.greedy(reference.encode(prompt), 20).tokens
    assert_greedy(greedy_completion(server, prompt, 20, **{parameter: strength}), expected, parameter)


def test_min_tokens_holds_the_end_back(server: LiveServer, reference: TextReference) -> None:
    end = reference.tokenizer.eos_token_id
    eager_to_end = {"ignore_eos": False, "logit_bias": {str(end): 100}, "skip_special_tokens": False}
    assert greedy_completion(server, PROMPT, 12, **eager_to_end) == [end]
    held = greedy_completion(server, PROMPT, 12, **eager_to_end, min_tokens=5)
    assert len(held) == 6
    assert held[-1] == end
    assert end not in held[:-1]


def test_only_top_k_stays_among_the_k_best(server: LiveServer, reference: TextReference) -> None:
    tokens = sample(server, 48, top_k=4)
    best = step_probabilities(reference, tokens).topk(4).indices.tolist()
    assert all(token in allowed for token, allowed in zip(tokens, best, strict=True))
    assert tokens != [allowed[0] for allowed in best]


def test_top_k_one_is_greedy(server: LiveServer, reference: TextReference) -> None:
    assert_greedy(sample(server, top_k=1), reference.greedy(reference.encode(PROMPT), 16), "top_k=1")


def test_only_top_p_stays_in_the_nucleus(server: LiveServer, reference: TextReference) -> None:
    tokens = sample(server, 48, top_p=0.6)
    probabilities = step_probabilities(reference, tokens)
    chosen = probabilities.gather(1, torch.tensor(tokens)[:, None])
    better = torch.where(probabilities > chosen, probabilities, 0.0).sum(-1)
    assert (better < 0.6 + 1e-3).all()
    assert tokens != probabilities.argmax(-1).tolist()


def test_only_min_p_stays_above_the_fraction(server: LiveServer, reference: TextReference) -> None:
    tokens = sample(server, 48, min_p=0.2)
    probabilities = step_probabilities(reference, tokens)
    chosen = probabilities.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (chosen >= 0.2 * probabilities.amax(-1) - 1e-4).all()
    assert tokens != probabilities.argmax(-1).tolist()


CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.8],
    "top_k": [None, 5],
    "top_p": [None, 0.9],
    "min_p": [None, 0.05],
    "seed": [None, 11],
    "repetition_penalty": [None, 1.1],
}


@pytest.mark.parametrize("stream", [False, True])
def test_every_combination_is_answered(server: LiveServer, client: openai.OpenAI, stream: bool) -> None:
    """No combination of parameters may end a request or the server."""
    for values in itertools.product(*CHOICES.values()):
        given = {name: value for name, value in zip(CHOICES, values, strict=True) if value is not None}
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, "stream": stream, **given}
        response = server.post("/v1/completions", body)
        assert response.status_code == 200, (given, response.text)
        assert "error" not in response.text, (given, response.text)
    assert server.healthy()


def test_batched_requests_with_different_parameters_keep_their_own(
    server: LiveServer, reference: TextReference
) -> None:
    """A greedy request's tokens do not depend on what its neighbours in the batch asked for."""
    from concurrent.futures import ThreadPoolExecutor

    neighbours: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {"top_k": 3, "temperature": 1.0},
        {"top_p": 0.5, "temperature": 0.7},
        {"min_p": 0.3, "temperature": 1.5},
        {"presence_penalty": 2.0},
        {"logit_bias": {"99": 100}},
        {"logprobs": 4},
    ]
    expected = reference.greedy(reference.encode(PROMPT), 24)
    with ThreadPoolExecutor(len(neighbours) + 1) as pool:
        others = [pool.submit(greedy_completion, server, PROMPT, 24, **parameters) for parameters in neighbours]
        plain = pool.submit(greedy_completion, server, PROMPT, 24)
        assert_greedy(plain.result(), expected, "beside other parameters")
        assert others[0].result() == sample(server, 24, seed=5)
        assert others[5].result() == [99] * 24
        assert_greedy(others[6].result(), expected, "with logprobs")
