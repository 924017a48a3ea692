"""Each structure that models differ in, tiny, gives transformers' greedy tokens in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import SMALL, STRUCTURES, structure_checkpoint
from tests.support.engine import engine, generate, greedy
from tests.support.reference import Reference
from tests.support.tokens import assert_replay

LENGTHS = (1, 5, 15, 16, 17, 40, 100)
"""Around the sliding windows (16) and block edges, and longer than one step's 32 tokens."""
NUM_TOKENS = 40


def random_prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, SMALL["vocab_size"]) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_equals_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = structure_checkpoint(name, tmp_path)
    prompts = random_prompts()
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "skip_tokenizer_init": True}
    with engine(checkpoint, kv_cache_memory_bytes=16 << 20, **options) as llm:
        together = generate(llm, prompts, greedy(NUM_TOKENS, detokenize=False))
        again = generate(llm, prompts, greedy(NUM_TOKENS, detokenize=False))
    reference = Reference(checkpoint)
    for prompt, first, second in zip(prompts, together, again, strict=True):
        assert_replay(reference, prompt, first, f"{name}, prompt of {len(prompt)}")
        assert_replay(reference, prompt, second, f"{name}, prompt of {len(prompt)} again")
