"""Top-k and top-p filters and the random choice."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from vllm.config.model import LogprobsMode
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

_CPU = torch.device("cpu")


def draw_uniform(
    rows: int, generators: dict[int, Generator], device: torch.device = _CPU, dtype: torch.dtype = torch.float64
) -> Tensor:
    """One number of `dtype` in [0, 1) per row, on `device`. Nothing waits for the device.

    ``generators`` maps the rows whose request has a seed to their generators, which draw where they live; the others
    share the CPU's default generator, which takes one draw of `rows` numbers per step unless every row has a seed.
    Ranks of a tensor-parallel group hold the same batch and seed the default generator alike, so they draw the same
    numbers and choose the same tokens.
    """
    seeded = len(generators) == rows
    uniform = (torch.empty if seeded else torch.rand)(rows, dtype=dtype).to(device, non_blocking=True)
    for row, generator in generators.items():
        uniform[row : row + 1] = torch.rand(1, dtype=dtype, generator=generator, device=generator.device)
    return uniform


class KunlunTopKTopPSampler(TopKTopPSampler):
    """Filters in place, without a sort, and draws by inversion of the cumulative distribution.

    One number per row, float64 where the device has it, replaces the exponential noise per token, so a seed gives
    other tokens than vLLM's samplers do (which differ between devices as well), from the same distribution.
    """

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs", noise_dtype: torch.dtype = torch.float64) -> None:
        super().__init__(logprobs_mode)
        self.noise_dtype = noise_dtype
        # vLLM's constructor binds the implementation for its device to the instance.
        self.forward = self.forward_native

    def forward_native(
        self, logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sampled ids, int64 [B], and the filtered logits or logprobs if ``logprobs_mode`` asks for them.

        ``logits``: float32 [B, V], filtered in place; ``k``: int32 or int64 [B]; ``p``: float32 [B].
        """
        if k is not None or p is not None:
            torch.ops.kunlun.top_k_top_p(logits, k, p)
        ids = torch.empty(logits.size(0), dtype=torch.int64, device=logits.device)
        uniform = draw_uniform(logits.size(0), generators, logits.device, self.noise_dtype)
        torch.ops.kunlun.sample(ids, logits, uniform)
        return ids, self._processed(logits)

    def _processed(self, logits: Tensor) -> Tensor | None:
        if self.logprobs_mode == "processed_logits":
            return logits
        if self.logprobs_mode == "processed_logprobs":
            return logits.log_softmax(dim=-1, dtype=torch.float32)
        return None
