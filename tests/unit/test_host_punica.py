"""LoRA products of a batch that mixes adapters and requests without one, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from vllm_kunlun.lora.host_punica import HostPunicaWrapper

TOKENS, WIDTH, RANK, OUT = 7, 33, 5, 19
SLOTS = [2, -1, 0, 0, -1, 1, 2]


@pytest.fixture
def wrapper() -> HostPunicaWrapper:
    made = HostPunicaWrapper(64, 8, torch.device("cpu"))
    indices = torch.tensor(SLOTS)
    made._token_lora_indices[:TOKENS] = indices
    made._sampler_indices[:TOKENS] = indices
    made.indices_len[0] = made.indices_len[1] = TOKENS
    made.regroup()
    return made


def stacked(*shape: int) -> torch.Tensor:
    return torch.randn(3, 1, *shape)


def expected(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    rows = [
        b[slot, 0] @ (a[slot, 0] @ token) * scale if slot >= 0 else torch.zeros(b.shape[2])
        for slot, token in zip(SLOTS, x, strict=True)
    ]
    return torch.stack(rows)


def test_linear_adds_each_tokens_own_adapter_and_nothing_without_one(wrapper: HostPunicaWrapper) -> None:
    x, y = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 2 * OUT)
    a, b = (stacked(RANK, WIDTH), stacked(RANK, WIDTH)), (stacked(OUT, RANK), stacked(OUT, RANK))
    wanted = y + torch.cat([expected(x, a[i], b[i], 0.5) for i in range(2)], dim=1)
    wrapper.add_lora_linear(y, x, a, b, 0.5, (OUT, OUT))
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_logits_use_the_sampled_tokens_adapters(wrapper: HostPunicaWrapper) -> None:
    x, y = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, OUT)
    a, b = stacked(RANK, WIDTH), stacked(OUT, RANK)
    wanted = y + expected(x, a, b, 2.0)
    wrapper.add_lora_logits(y, x, a, b, 2.0)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
