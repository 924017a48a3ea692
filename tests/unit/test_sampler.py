"""The sampler: its distribution, its seeds, its noise, and what it returns beside the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_kunlun import ops
from vllm_kunlun.sampling import KunlunTopKTopPSampler, build_sampler, use_min_p_op
from vllm_kunlun.sampling.topk_topp import draw_uniform


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    ops.activate()


def seeded(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def g_test_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Likelihood-ratio test of observed counts; the statistic is chi-squared distributed (Wilks, 1938)."""
    expected = probabilities.double() * counts.sum()
    assert expected.min() >= 5, "too few draws for the approximation"
    seen = counts > 0
    statistic = 2 * (counts[seen] * (counts[seen] / expected[seen]).log()).sum()
    half_freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def draw(logits: torch.Tensor, times: int, **filters: float) -> torch.Tensor:
    """Counts per token of `times` draws from one row of logits, in batches of 1,000 rows."""
    sampler = KunlunTopKTopPSampler()
    counts = torch.zeros(logits.numel(), dtype=torch.float64)
    k = torch.full((1000,), int(filters["k"])) if "k" in filters else None
    p = torch.full((1000,), filters["p"]) if "p" in filters else None
    rows = logits.expand(1000, -1)
    for _ in range(times // 1000):
        ids, _ = sampler(rows.clone() if filters else rows, {}, k, p)
        counts += torch.bincount(ids, minlength=logits.numel())
    return counts


@pytest.mark.parametrize("filters", [{}, {"k": 20}, {"p": 0.8}, {"k": 30, "p": 0.9}], ids=str)
def test_tokens_follow_the_distribution(filters: dict[str, float]) -> None:
    torch.manual_seed(7)
    logits = torch.randn(60)
    k, p = torch.tensor([int(filters.get("k", 60))]), torch.tensor([filters.get("p", 1.0)])
    torch.ops.kunlun.top_k_top_p(filtered := logits.clone().unsqueeze(0), k, p)
    probabilities = filtered[0].softmax(-1)
    counts = draw(logits, 100_000, **filters)
    inside = probabilities > 0
    assert counts[~inside].sum() == 0
    assert g_test_p_value(counts[inside], probabilities[inside]) > 1e-4


def test_the_distribution_test_can_fail() -> None:
    torch.manual_seed(7)
    logits = torch.randn(60)
    counts = draw(logits, 100_000)
    assert g_test_p_value(counts, (1.05 * logits).softmax(-1)) < 1e-4


def test_long_rows_follow_the_distribution_across_blocks() -> None:
    torch.manual_seed(3)
    logits = torch.randn(50_000)
    counts = draw(logits, 20_000).view(50, 1000).sum(-1)
    assert g_test_p_value(counts, logits.double().softmax(-1).view(50, 1000).sum(-1)) > 1e-4


def test_a_seed_reproduces_wherever_its_row_is() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    sampler = KunlunTopKTopPSampler()
    alone, together = seeded(5), {2: torch.Generator().manual_seed(5)}
    for _ in range(20):
        first, _ = sampler(logits[:1].clone(), alone, None, None)
        batch, _ = sampler(logits[[1, 2, 0]], together, None, None)
        assert batch[2] == first[0]


def test_rows_without_a_seed_use_the_default_generator() -> None:
    torch.manual_seed(11)
    first = draw_uniform(4, {})
    torch.manual_seed(11)
    assert torch.equal(draw_uniform(4, {}), first)
    torch.manual_seed(11)
    mixed = draw_uniform(4, {1: torch.Generator().manual_seed(2)})
    assert mixed[[0, 2, 3]].tolist() == first[[0, 2, 3]].tolist()
    assert mixed[1] != first[1]


def test_ranks_that_are_seeded_alike_draw_the_same_noise() -> None:
    noise = []
    for rank in range(2):
        torch.manual_seed(0)
        steps = [draw_uniform(rows, {0: torch.Generator().manual_seed(9)}) for rows in (1, 3, 16, 1, 2)]
        noise.append(torch.cat(steps))
        assert noise[rank].min() >= 0
        assert noise[rank].max() < 1
    assert torch.equal(*noise)


def test_fully_seeded_steps_leave_the_default_generator_alone() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    draw_uniform(3, seeded(1, 2, 3))
    assert torch.equal(torch.get_rng_state(), state)


def metadata(rows: int, temperature: Iterable[float], **changes: object) -> SamplingMetadata:
    temperatures = torch.tensor(list(temperature))
    fields: dict[str, object] = {
        "temperature": temperatures,
        "all_greedy": bool((temperatures == 0).all()),
        "all_random": bool((temperatures > 0).all()),
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "logprob_token_ids": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [[] for _ in range(rows)],
        "spec_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_first_greatest_logit(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[2, 40] = logits[2, 700] = 9.0
    output = build_sampler("raw_logprobs")(logits.clone(), metadata(4, [0.0] * 4))
    assert output.sampled_token_ids.flatten().tolist() == logits.argmax(-1).tolist()
    assert output.sampled_token_ids[2].item() == 40


def test_greedy_and_random_rows_share_a_batch() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    sampler = build_sampler("raw_logprobs")
    seen = [sampler(logits.clone(), metadata(4, [0.0, 1.0, 0.0, 1.0])).sampled_token_ids.flatten() for _ in range(20)]
    tokens = torch.stack(seen)
    assert torch.equal(tokens[:, [0, 2]], logits.argmax(-1)[[0, 2]].int().expand(20, 2))
    assert all(tokens[:, row].unique().numel() > 5 for row in (1, 3))


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("top_p", [None, 0.5])
@pytest.mark.parametrize("seeds", [{}, {1: 3}, {0: 1, 1: 2}], ids=["no seed", "one seed", "all seeds"])
def test_every_combination_of_filters_and_seeds_samples(
    top_k: int | None, top_p: float | None, seeds: dict[int, int]
) -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    settings = metadata(
        2,
        [0.7, 1.3],
        top_k=None if top_k is None else torch.tensor([top_k, 100], dtype=torch.int32),
        top_p=None if top_p is None else torch.tensor([top_p, 1.0]),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()},
    )
    tokens = build_sampler("raw_logprobs")(logits.clone(), settings).sampled_token_ids.flatten()
    best = logits[0].topk(5).indices.tolist()
    assert 0 <= tokens[1] < 100
    assert top_k is None or tokens[0] in best


def test_processed_logits_and_logprobs_are_those_after_the_filters() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    k = torch.tensor([5, 100])
    _, nothing = KunlunTopKTopPSampler("raw_logprobs")(logits.clone(), {}, k, None)
    _, processed = KunlunTopKTopPSampler("processed_logits")(logits.clone(), {}, k, None)
    _, logprobs = KunlunTopKTopPSampler("processed_logprobs")(logits.clone(), {}, k, None)
    assert nothing is None
    assert processed is not None
    assert logprobs is not None
    assert (processed > -math.inf).sum(-1).tolist() == [5, 100]
    assert torch.equal(logprobs, processed.log_softmax(-1))


def test_requested_logprobs_come_with_the_tokens() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    output = build_sampler("raw_logprobs")(logits.clone(), metadata(2, [1.0, 1.0], max_num_logprobs=3))
    assert output.logprobs_tensors is not None
    expected = logits.log_softmax(-1).gather(1, output.sampled_token_ids.long())
    torch.testing.assert_close(output.logprobs_tensors.logprobs[:, :1], expected)


def test_min_p_op_takes_the_place_of_the_softmax() -> None:
    config = VllmConfig()
    processors = LogitsProcessors([MinPLogitsProcessor(config, torch.device("cpu"), False)])
    native = MinPLogitsProcessor(config, torch.device("cpu"), False)
    use_min_p_op(processors, config, torch.device("cpu"))
    [ours] = processors.argmax_invariant
    assert type(ours) is not MinPLogitsProcessor
    params = [SamplingParams(min_p=value) for value in (0.2, 0.0, 0.9)]
    update = BatchUpdate(batch_size=3, removed=[], moved=[], added=[(i, p, [], []) for i, p in enumerate(params)])
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours.apply(logits.clone()), logits)
    for processor in (ours, native):
        processor.update_state(update)
    assert torch.equal(ours.apply(logits.clone()), native.apply(logits.clone()))
