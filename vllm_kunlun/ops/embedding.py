"""Token embedding and the split of a vocabulary over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_kunlun.ops.contract import Case, Op, define


def _embedding(out: Tensor, ids: Tensor, weight: Tensor) -> None:
    out.copy_(torch.nn.functional.embedding(ids, weight))


# (tokens, vocabulary, width)
_TABLES = ((1, 5, 33), (0, 5, 8), (37, 100, 576), (3, 1, 1), (300, 1000, 64))


def _embedding_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for tokens, vocab, width in _TABLES:
        for id_dtype in (torch.int32, torch.int64):
            ids = torch.randint(vocab, (tokens,), generator=generator, dtype=id_dtype)
            weight = torch.randn(vocab, width, generator=generator).to(dtype)
            args = {"out": weight.new_empty(tokens, width), "ids": ids, "weight": weight}
            yield Case(f"{tokens} of {vocab}x{width} {id_dtype}", dtype, args)
    table = torch.randn(9, 40, generator=generator).to(dtype)[:, 8:32]
    ids = torch.tensor([8, 0, 8])
    yield Case("strided", dtype, {"out": table.new_empty(3, 30)[:, :24], "ids": ids, "weight": table})


EMBEDDING = define(
    Op(
        name="embedding",
        schema="(Tensor(a!) out, Tensor ids, Tensor weight) -> ()",
        reference=_embedding,
        cases=_embedding_cases,
        exact=frozenset({"out"}),
    )
)
"""out[t] = weight[ids[t]].

``ids``: int32 or int64 [T]. ``weight``: [V, H] and ``out``: [T, H], rows may be strided. Raises on an id outside the
table, and names it.
"""


def _vocab_parallel_mask(
    local_ids: Tensor,
    outside: Tensor,
    ids: Tensor,
    org_start: int,
    org_end: int,
    num_org_padding: int,
    added_start: int,
    added_end: int,
) -> None:
    original = (ids >= org_start) & (ids < org_end)
    added = (ids >= added_start) & (ids < added_end)
    added_offset = added_start - (org_end - org_start) - num_org_padding
    held = original | added
    local_ids.copy_(held * (ids - org_start * original - added_offset * added))
    outside.copy_(~held)


# (org_start, org_end, num_org_padding, added_start, added_end) of one rank, ids below 130.
_SHARDS = (
    (0, 50, 14, 100, 110),  # first of two ranks, padded, with added ids
    (50, 100, 0, 110, 120),
    (0, 130, 0, 130, 130),  # one rank holds all
    (64, 64, 64, 100, 100),  # a rank that holds nothing
)


def _mask_cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for shard in _SHARDS:
        for tokens in (0, 1, 77):
            id_dtype = torch.int32 if tokens == 1 else torch.int64
            ids = torch.randint(130, (tokens,), generator=generator, dtype=id_dtype)
            names = ("org_start", "org_end", "num_org_padding", "added_start", "added_end")
            outputs = {"local_ids": torch.empty_like(ids), "outside": torch.empty(tokens, dtype=torch.bool)}
            yield Case(f"{tokens} {shard}", dtype, {**outputs, "ids": ids, **dict(zip(names, shard, strict=True))})


VOCAB_PARALLEL_MASK = define(
    Op(
        name="vocab_parallel_mask",
        schema="(Tensor(a!) local_ids, Tensor(b!) outside, Tensor ids, int org_start, int org_end,"
        " int num_org_padding, int added_start, int added_end) -> ()",
        reference=_vocab_parallel_mask,
        cases=_mask_cases,
        dtypes=(torch.float32,),
        exact=frozenset({"local_ids", "outside"}),
    )
)
"""Rows of this rank's part of the embedding table for ids of the whole vocabulary, as vLLM lays that part out.

The part holds the ids org_start ≤ id < org_end, ``num_org_padding`` unused rows, then added_start ≤ id < added_end.
``ids``: int32 or int64 [T]. ``local_ids``: the ids' type, the row, or 0 for an id that another rank holds.
``outside``: bool, whether another rank holds it.
"""
