"""Attention and cache ops beyond the contract's cases: several threads, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.checking import check
from vllm_kunlun import ops
from vllm_kunlun.ops.native import library

SEED = 20261130


@pytest.fixture
def three_threads() -> Iterator[None]:
    ops.table()
    library.configure_threads([], 3, 0)
    yield
    library.configure_threads([], 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paged_attention", "varlen_attention", "reshape_and_cache"])
def test_sequences_split_over_threads_match_reference(name: str, dtype: torch.dtype, three_threads: None) -> None:
    op = ops.ops()[name]
    for case in op.cases(torch.Generator().manual_seed(SEED), dtype):
        check(op, case, op.call)


def paged_call(**changes: Any) -> None:
    """Two requests, one decoding at 20 tokens and one prefilling 3, with `changes` to the arguments."""
    cache = torch.randn(6, 2, 16, 64)
    args: dict[str, Any] = {
        "out": torch.empty(4, 4, 32),
        "query": torch.randn(4, 4, 32),
        "key_cache": cache[..., :32],
        "value_cache": cache[..., 32:],
        "block_table": torch.tensor([[4, 2], [5, -1]], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 3], dtype=torch.int32),
        "scale": 0.2,
        "causal": True,
        "window_left": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "sinks": None,
    }
    ops.table()
    ops.ops()["paged_attention"].call(*{**args, **changes}.values())


def test_paged_attention_accepts_the_unchanged_call() -> None:
    paged_call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.tensor([[4, 6], [5, -1]], dtype=torch.int32)}, r"block_table\[0, 1\] is 6.*6 blocks"),
        ({"block_table": torch.tensor([[4, -1], [5, 0]], dtype=torch.int32)}, r"block_table\[0, 1\] is -1"),
        ({"block_table": torch.tensor([[4, 2]], dtype=torch.int32)}, r"block_table must be int32 \[at least 2"),
        ({"block_table": torch.tensor([[4, 2], [5, 0]])}, "block_table must be int32"),
        ({"seq_lens": torch.tensor([33, 3], dtype=torch.int32)}, r"seq_lens\[0\] is 33.*2 blocks of 16"),
        ({"seq_lens": torch.tensor([-1, 3], dtype=torch.int32)}, r"seq_lens\[0\] is -1"),
        ({"seq_lens": torch.tensor([20], dtype=torch.int32)}, "seq_lens must be contiguous int32 with at least 2"),
        ({"query_start_loc": torch.tensor([0, 1, 5], dtype=torch.int32)}, "query_start_loc ends at 5.*4 rows"),
        ({"query_start_loc": torch.tensor([0, 2, 1], dtype=torch.int32)}, "query_start_loc must rise from 0"),
        ({"query": torch.randn(4, 4, 32).bfloat16()}, "out the same"),
        ({"query": torch.randn(4, 4, 48), "out": torch.empty(4, 4, 48)}, "head size of query is 48.*32"),
        ({"query": torch.randn(4, 3, 32), "out": torch.empty(4, 3, 32)}, "3 heads, which is no multiple of the 2"),
        ({"key_cache": torch.randn(6, 2, 16, 32).half()}, "of one type"),
        ({"key_cache": torch.randn(6, 2, 16, 64)[..., ::2]}, "last dimension of key"),
        ({"sinks": torch.randn(3)}, r"sinks must be of shape \[4\]"),
        ({"alibi_slopes": torch.randn(4, 2)}, r"alibi_slopes must be of shape \[4\]"),
        ({"softcap": -1.0}, "softcap must be 0"),
    ],
)
def test_paged_attention_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"paged_attention: .*{message}"):
        paged_call(**changes)


def test_varlen_attention_refuses_other_numbers_of_requests() -> None:
    ops.table()
    query, starts = torch.randn(4, 2, 32), torch.tensor([0, 4], dtype=torch.int32)
    more = torch.tensor([0, 2, 4], dtype=torch.int32)
    call = ops.ops()["varlen_attention"].call
    with pytest.raises(RuntimeError, match="query_start_loc has 1 requests, key_start_loc 2"):
        call(torch.empty_like(query), query, query, query, starts, more, 0.2, False, -1, -1, 0.0, None, None)


def test_reshape_and_cache_refuses_a_slot_outside_the_cache() -> None:
    ops.table()
    cache, key = torch.zeros(2, 1, 4, 16), torch.ones(2, 1, 8)
    call = ops.ops()["reshape_and_cache"].call
    with pytest.raises(RuntimeError, match=r"reshape_and_cache: slot_mapping\[1\] is 8.*8 slots"):
        call(cache[..., :8], cache[..., 8:], key, key, torch.tensor([7, 8]))
    with pytest.raises(RuntimeError, match="reshape_and_cache: key is Float and its cache Half"):
        call(cache[..., :8].half(), cache[..., 8:].half(), key, key, torch.tensor([7, 6]))


def test_slot_mapping_refuses_a_position_outside_the_block_table() -> None:
    ops.table()
    starts, table = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([[3, 1]], dtype=torch.int32)
    call = ops.ops()["slot_mapping"].call
    with pytest.raises(RuntimeError, match=r"slot_mapping: positions\[1\] is 8.*2 blocks of 4"):
        call(torch.empty(2, dtype=torch.int64), starts, torch.tensor([7, 8]), table, 4, -1)
    with pytest.raises(RuntimeError, match="slot_mapping: query_start_loc ends at 2"):
        call(torch.empty(1, dtype=torch.int64), starts, torch.tensor([7, 6]), table, 4, -1)


def test_zero_blocks_refuses_an_id_outside_the_cache_and_writes_nothing() -> None:
    ops.table()
    cache = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match=r"zero_blocks: block_ids\[1\] is 3.*3 blocks"):
        ops.ops()["zero_blocks"].call(cache, torch.tensor([0, 3]))
    assert torch.equal(cache, torch.ones(3, 4))
