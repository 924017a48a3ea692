"""Token embedding and the split of a vocabulary over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define


def _embedding(out: Tensor, ids: Tensor, weight: Tensor) -> None:
    out.copy_(torch.nn.functional.embedding(ids, weight))


def _cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tokens, vocab, width in ((1, 5, 33), (0, 5, 8), (37, 100, 576)):
        ids = torch.randint(vocab, (tokens,), generator=generator)
        weight = torch.randn(vocab, width, generator=generator).to(dtype)
        yield Case(
            f"{tokens}x{vocab}x{width}", dtype, {"out": weight.new_empty(tokens, width), "ids": ids, "weight": weight}
        )


EMBEDDING = define(
    Op(
        name="embedding",
        schema="(Tensor(a!) out, Tensor ids, Tensor weight) -> ()",
        reference=_embedding,
        cases=_cases,
        exact=frozenset({"out"}),
    )
)
"""out[t] = weight[ids[t]]; ids int32 or int64 [T], weight [V, H], out [T, H]."""
