"""Top-k and top-p filters and the random choice."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from vllm.config.model import LogprobsMode
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


def draw_uniform(rows: int, generators: dict[int, Generator]) -> Tensor:
    """One float64 in [0, 1) per row, on the CPU.

    ``generators`` maps the rows whose request has a seed to their generators; the others share the default generator,
    which takes one draw of `rows` numbers per step unless every row has a seed. Ranks of a tensor-parallel group hold
    the same batch and seed the default generator alike, so they draw the same numbers and choose the same tokens.
    """
    seeded = len(generators) == rows
    uniform = (torch.empty if seeded else torch.rand)(rows, dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row : row + 1] = torch.rand(1, dtype=torch.float64, generator=generator, device=generator.device)
    return uniform


class KunlunTopKTopPSampler(TopKTopPSampler):
    """Filters in place, without a sort, and draws by inversion of the cumulative distribution.

    One float64 number per row replaces the exponential noise per token, so a seed gives other tokens than vLLM's
    samplers do (which differ between devices as well), from the same distribution.
    """

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        super().__init__(logprobs_mode)
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
        torch.ops.kunlun.sample(ids, logits, draw_uniform(logits.size(0), generators).to(logits.device))
        return ids, self._processed(logits)

    def _processed(self, logits: Tensor) -> Tensor | None:
        if self.logprobs_mode == "processed_logits":
            return logits
        if self.logprobs_mode == "processed_logprobs":
            return logits.log_softmax(dim=-1, dtype=torch.float32)
        return None
