"""Sampled tokens follow the distribution that the parameters describe, and seeds reproduce."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.support.checkpoints import sharp_checkpoint
from tests.support.engine import engine, generate
from tests.support.reference import Reference

PROMPT = [5, 77, 301, 12, 498, 250]
NUM_SAMPLES = 6000
SMALLEST_EXPECTED = 5.0
STANDARD_NORMAL_QUANTILE = 4.0
"""One false alarm in about 30,000 runs; the seeds are fixed, so there is none."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    options = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "skip_tokenizer_init": True}
    with engine(tiny, kv_cache_memory_bytes=16 << 20, seed=1, **options) as made:
        yield made


@pytest.fixture(scope="module")
def logits(tiny: Path) -> torch.Tensor:
    """The reference's logits after the prompt, [vocab]."""
    return Reference(tiny).logits(PROMPT)[-1].double()


def expected_probabilities(logits: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """What vLLM documents: temperature first, then min-p, top-k and top-p, renormalized."""
    probabilities = (logits / given.get("temperature", 1.0)).softmax(-1)
    probabilities[probabilities < given.get("min_p", 0.0) * probabilities.max()] = 0.0
    if "top_k" in given:
        probabilities[probabilities < probabilities.topk(given["top_k"]).values[-1]] = 0.0
    probabilities /= probabilities.sum()
    ordered = probabilities.sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    probabilities[ordered.indices[before >= given.get("top_p", 1.0)]] = 0.0
    return probabilities / probabilities.sum()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare tokens share one bin."""
    expected = probabilities * counts.sum()
    common = expected >= SMALLEST_EXPECTED
    observed, wanted = counts[common], expected[common]
    rest = expected[~common].sum()
    if rest >= SMALLEST_EXPECTED:
        observed = torch.cat([observed, counts[~common].sum()[None]])
        wanted = torch.cat([wanted, rest[None]])
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def chi_square_limit(freedom: int) -> float:
    """The quantile of the chi-square distribution, by Wilson and Hilferty's cube root approximation (1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + STANDARD_NORMAL_QUANTILE * math.sqrt(spread)) ** 3


PARAMETERS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 20, "top_p": 0.8},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


def sampled(llm: LLM, given: Mapping[str, Any], seeded: bool) -> torch.Tensor:
    """How often each token was drawn in many requests of one token, [vocab]."""
    common = {"temperature": 1.0, "max_tokens": 1, "detokenize": False, **given}
    parameters = [SamplingParams(**common, seed=number if seeded else None) for number in range(NUM_SAMPLES)]
    tokens = generate(llm, [PROMPT] * NUM_SAMPLES, parameters)
    return torch.bincount(torch.tensor([token for (token,) in tokens]), minlength=512).double()


@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_samples_follow_the_distribution(llm: LLM, logits: torch.Tensor, name: str, seeded: bool) -> None:
    probabilities = expected_probabilities(logits, PARAMETERS[name])
    counts = sampled(llm, PARAMETERS[name], seeded)
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that the parameters rule out"
    statistic, freedom = chi_square(counts, probabilities)
    assert freedom >= 2
    assert statistic < chi_square_limit(freedom), f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


def test_the_test_notices_a_wrong_distribution(llm: LLM, logits: torch.Tensor) -> None:
    """A temperature that is off by a tenth, or a top-k off by one, must not pass."""
    plain, best = sampled(llm, {}, seeded=True), sampled(llm, {"top_k": 8}, seeded=True)
    statistic, freedom = chi_square(plain, expected_probabilities(logits, {"temperature": 1.1}))
    assert statistic > chi_square_limit(freedom)
    assert best[expected_probabilities(logits, {"top_k": 7}) == 0].sum() > 0


def test_a_seed_reproduces_whatever_else_is_in_the_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=24, ignore_eos=True, detokenize=False)
    other = SamplingParams(temperature=1.0, top_k=9, max_tokens=11, ignore_eos=True, detokenize=False)
    (alone,) = generate(llm, [PROMPT], seeded)
    beside = generate(llm, [PROMPT[:3], PROMPT, PROMPT[2:], PROMPT], [other, seeded, other, seeded])
    assert beside[1] == alone
    assert beside[3] == alone


def test_different_seeds_differ(llm: LLM) -> None:
    parameters = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, detokenize=False)
        for seed in range(8)
    ]
    assert len({tuple(tokens) for tokens in generate(llm, [PROMPT] * 8, parameters)}) == 8


def test_n_samples_of_one_request_differ(llm: LLM) -> None:
    parameters = SamplingParams(n=8, temperature=1.0, max_tokens=12, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    assert len(output.outputs) == 8
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 8
