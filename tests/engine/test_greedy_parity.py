"""Greedy tokens equal transformers' in float32, one sequence at a time and in batches, cached prefixes and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLM

from tests.engine.prompts import PROMPTS
from tests.support.engine import engine, generate, greedy
from tests.support.reference import TextReference
from tests.support.tokens import assert_replay

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def prompts(reference: TextReference) -> list[list[int]]:
    encoded = [reference.encode(prompt) for prompt in PROMPTS]
    assert len(encoded) == 20
    assert max(map(len, encoded)) > 2 * 64
    return encoded


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, max_num_batched_tokens=64, enable_prefix_caching=True) as made:
        yield made


@pytest.mark.timeout(600)
def test_one_sequence_at_a_time(llm: LLM, reference: TextReference, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        (tokens,) = generate(llm, [prompt], greedy(NUM_TOKENS))
        assert_replay(reference, prompt, tokens, f"prompt of {len(prompt)}")


def test_sixteen_sequences_with_cached_prefixes_and_chunks(
    llm: LLM, reference: TextReference, prompts: list[list[int]]
) -> None:
    for prompt, tokens in zip(prompts, generate(llm, prompts, greedy(NUM_TOKENS)), strict=True):
        assert_replay(reference, prompt, tokens, f"prompt of {len(prompt)} in a batch")


def test_sixteen_sequences_without_cached_prefixes(
    checkpoint: Path, reference: TextReference, prompts: list[list[int]]
) -> None:
    with engine(checkpoint, max_num_batched_tokens=1024, enable_prefix_caching=False, block_size=64) as llm:
        outputs = generate(llm, prompts, greedy(NUM_TOKENS))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_replay(reference, prompt, tokens, f"prompt of {len(prompt)} computed whole")


def test_preempted_sequences_go_on_with_the_same_tokens(
    checkpoint: Path, reference: TextReference, prompts: list[list[int]]
) -> None:
    """A cache too small for all sequences: some lose their blocks and compute them again."""
    blocks = 40
    with engine(checkpoint, max_model_len=384, num_gpu_blocks_override=blocks, disable_log_stats=False) as llm:
        outputs = generate(llm, prompts, greedy(NUM_TOKENS))
        preempted = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert_replay(reference, prompt, tokens, f"prompt of {len(prompt)} with preemption")
