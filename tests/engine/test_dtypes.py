"""In bfloat16 and float16 the log-probabilities stay close to float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.prompts import PROMPTS
from tests.support.engine import engine, greedy
from tests.support.reference import TextReference

LIMITS = {"bfloat16": 0.02, "float16": 0.004}
"""Relative L2 of the log-probabilities of prompts' tokens; transformers' own are 0.010 and 0.0015 from float32."""
TEXTS = [text for text in PROMPTS if len(text) > 15 and not text.startswith("word ")]
"""Not the prompt of one word over and over: its log-probabilities are near zero, any rounding is relatively big."""


def prompt_logprobs(checkpoint: Path, dtype: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    parameters = greedy(1, prompt_logprobs=0)
    with engine(checkpoint, dtype=dtype) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    given = []
    for prompt, output in zip(prompts, outputs, strict=True):
        entries = output.prompt_logprobs[1:]
        given.append(torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)]))
    return given


@pytest.mark.parametrize("dtype", LIMITS)
def test_logprobs_are_close_to_float32(checkpoint: Path, reference: TextReference, dtype: str) -> None:
    prompts = [reference.encode(prompt) for prompt in TEXTS]
    given = torch.cat(prompt_logprobs(checkpoint, dtype, prompts))
    expected = torch.cat(
        [
            reference.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            for prompt in prompts
        ]
    )
    error = float((given - expected).norm() / expected.norm())
    print(f"{dtype}: relative L2 {error:.2e}")
    assert error < LIMITS[dtype]
