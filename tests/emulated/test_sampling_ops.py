"""Emulated sampling: what may be drawn, how often, and log-probabilities."""

import pytest
import torch


def allowed_by_loop(probs, top_k=None, top_p=1.0):
    """Ids that a row may give: the top_k first, then the most probable that together reach top_p."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[:top_k]
    total, reached, kept = sum(probs[i] for i in order), 0.0, set()
    for token in order:
        if kept and reached >= top_p * total - 1e-7:
            break
        kept.add(token)
        reached += probs[token]
    return kept


@pytest.fixture
def probs():
    generator = torch.Generator().manual_seed(5)
    return torch.softmax(2 * torch.randn(3, 12, generator=generator), -1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("top_k_sampling_from_probs", {"top_k": torch.tensor([1, 4, 12], dtype=torch.int32)}),
        ("top_k_sampling_from_probs", {"top_k": 3}),
        ("top_p_sampling_from_probs", {"top_p": torch.tensor([0.3, 0.8, 1.0])}),
        ("top_p_sampling_from_probs", {"top_p": 0.05}),
        (
            "top_k_top_p_sampling_from_probs",
            {"top_k": torch.tensor([5, 2, 9], dtype=torch.int32), "top_p": torch.tensor([0.7, 0.9, 0.5])},
        ),
    ],
)
def test_only_allowed_tokens_are_drawn_and_all_of_them(stack, probs, name, options):
    import kunlun_ops

    torch.manual_seed(11)
    draws = torch.stack([getattr(kunlun_ops, name)(probs, **options, deterministic=True) for _ in range(600)])
    assert draws.dtype == torch.int64
    for row in range(3):
        values = {
            key: value[row].item() if isinstance(value, torch.Tensor) else value for key, value in options.items()
        }
        allowed = allowed_by_loop(probs[row].tolist(), values.get("top_k"), values.get("top_p", 1.0))
        drawn = draws[:, row].tolist()
        assert set(drawn) <= allowed
        mass = sum(float(probs[row, token]) for token in allowed)
        for token in allowed:
            assert abs(drawn.count(token) / 600 - float(probs[row, token]) / mass) < 0.1


def test_log_probabilities_at_ids(stack, randn):
    logits, ids = randn(4, 30), torch.tensor([[0, 29], [3, 3], [7, 1], [12, 2]])
    out = torch.ops.xspeedgate_ops.compute_token_logprobs(logits, ids)
    for row in range(4):
        for column in range(2):
            value = logits[row].double()
            expected = value[ids[row, column]] - torch.log(torch.exp(value).sum())
            assert abs(float(out[row, column]) - float(expected)) < 1e-5


def test_exponential_noise_follows_its_generator():
    from vllm_kunlun import emulator

    with emulator.running("torch25", device=False):
        fill = torch.ops.xspeedgate_ops.inplace_exponential
        noise = [torch.empty(2000) for _ in range(2)]
        for q in noise:
            fill(q, generator=torch.Generator().manual_seed(3))
        assert torch.equal(*noise)
        assert (noise[0] > 0).all() and abs(float(noise[0].mean()) - 1) < 0.1
