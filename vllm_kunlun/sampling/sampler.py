"""The sampler that the model runner holds."""

from __future__ import annotations

import torch
from vllm.config.model import LogprobsMode
from vllm.v1.sample.sampler import Sampler

from vllm_kunlun.sampling.topk_topp import KunlunTopKTopPSampler


class KunlunSampler(Sampler):
    """vLLM's sampler; temperature, greedy and random choice are ops."""

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs", noise_dtype: torch.dtype = torch.float64) -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler = KunlunTopKTopPSampler(logprobs_mode, noise_dtype)

    @staticmethod
    def apply_temperature(logits: torch.Tensor, temp: torch.Tensor, all_random: bool) -> torch.Tensor:
        """Divides logits, float32 [B, V], by temp, float32 [B], in place; greedy rows stay as they are."""
        torch.ops.kunlun.temperature(logits, temp)
        return logits

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """First index of the greatest logit of each row, int64 [B]. logits: [B, V]."""
        ids = torch.empty(logits.size(0), dtype=torch.int64, device=logits.device)
        torch.ops.kunlun.argmax(ids, logits)
        return ids


def build_sampler(logprobs_mode: LogprobsMode, noise_dtype: torch.dtype = torch.float64) -> KunlunSampler:
    """The sampler of a model runner; vLLM's ``use_fp64_gumbel`` has nothing to add to its float64 noise.

    ``noise_dtype``: float32 for devices that have no float64.
    """
    return KunlunSampler(logprobs_mode, noise_dtype)
