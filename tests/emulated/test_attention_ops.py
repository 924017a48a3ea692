"""Emulated attention against loops over requests, heads and queries."""

import math

import pytest
import torch

from tests.emulated import formulas
from tests.emulated.calls import decode, offsets, prefill
from tests.emulated.formulas import DTYPES, close


def by_request(query, key, value, query_lengths, key_lengths, scale, **options):
    starts, places, parts = offsets(query_lengths), offsets(key_lengths), []
    for i in range(len(query_lengths)):
        part = [
            t.float() for t in (query[starts[i] : starts[i + 1]], *(x[places[i] : places[i + 1]] for x in (key, value)))
        ]
        parts.append(formulas.attention(*part, scale, **options))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)


def scattered(parts, block_size, tables):
    """A cache of the keys of several requests, with NaN wherever nothing belongs."""
    blocks = max(max(table) for table in tables) + 1
    cache = torch.full((blocks, parts[0].shape[1], block_size, parts[0].shape[2]), float("nan"))
    for part, table in zip(parts, tables, strict=True):
        for place, row in enumerate(part):
            cache[table[place // block_size], :, place % block_size] = row
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 32), (6, 2, 64), (3, 1, 80)])
def test_dense_prefill_of_several_requests(stack, randn, dtype, heads, kv_heads, width):
    lengths = [5, 1, 9]
    query, key, value = (randn(15, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    out = prefill(query, key, value, lengths, lengths)
    assert close(out, by_request(query, key, value, lengths, lengths, 1 / math.sqrt(width))[0], dtype)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_alpha_comes_on_top_of_the_head_size(stack, randn, scale):
    query, key, value = (randn(7, 2, 64) for _ in range(3))
    expected = by_request(query, key, value, [7], [7], scale)[0]
    assert close(prefill(query, key, value, [7], [7], alpha=scale * math.sqrt(64)), expected)
    assert not close(prefill(query, key, value, [7], [7], alpha=scale), expected, torch.bfloat16)


def test_prefill_options_and_log_sum_exp(stack, randn):
    query, key, value = (randn(8, n, 32) for n in (4, 2, 2))
    slopes, sink, lse = torch.tensor([0.5, 0.25, 0.125, 0.0625]), randn(4), torch.empty(4, 8)
    out = prefill(query, key, value, [8], [8], alibi_slopes=slopes, sink=sink, softmax_lse=lse)
    expected = by_request(query, key, value, [8], [8], 32**-0.5, slopes=slopes, sink=sink)
    assert close(out, expected[0]) and close(lse, expected[1])


def test_encoder_attention_sees_what_follows(stack, randn):
    query, key, value = (randn(6, 2, 32) for _ in range(3))
    out = prefill(query, key, value, [4, 2], [4, 2], is_causal=False)
    assert close(out, by_request(query, key, value, [4, 2], [4, 2], 32**-0.5, causal=False)[0])


@pytest.mark.parametrize("window", [1, 3, 50])
def test_window_of_the_prefill(stack, randn, window):
    query, key, value = (randn(10, 2, 32) for _ in range(3))
    out = prefill(query, key, value, [10], [10], swa_left=window, swa_right=0)
    assert close(out, by_request(query, key, value, [10], [10], 32**-0.5, window=window)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_prefill_over_the_paged_cache(stack, randn, dtype, block_size):
    query_lengths, key_lengths, tables = [3, 2, 4], [11, 2, 21], [[5, 0, 3], [1, 1, 1], [2, 4, 6, 7, 8, 9]]
    query = randn(9, 4, 32, dtype=dtype)
    parts = [[randn(n, 2, 32, dtype=dtype) for n in key_lengths] for _ in range(2)]
    table = torch.zeros(3, 6, dtype=torch.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks)
    caches = [scattered(part, block_size, tables).to(dtype) for part in parts]
    out = prefill(query, *caches, query_lengths, key_lengths, block_table=table)
    key, value = (torch.cat(part) for part in parts)
    assert close(out, by_request(query, key, value, query_lengths, key_lengths, 32**-0.5)[0], dtype)


def paged_case(randn, lengths, block_size, kv_heads=2, width=32, dtype=torch.float32):
    """Keys and values of each request, their caches, and a block table with blocks in no order."""
    blocks = [-(-n // block_size) for n in lengths]
    numbers = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[numbers.pop() for _ in range(count)] or [0] for count in blocks]
    table = torch.full((len(lengths), max(blocks) + 1), -7, dtype=torch.int32)
    for row, own in enumerate(tables):
        table[row, : len(own)] = torch.tensor(own)
    parts = [[randn(n, kv_heads, width, dtype=dtype) for n in lengths] for _ in range(2)]
    return parts, [scattered(part, block_size, tables).to(dtype) for part in parts], table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qlen", [1, 3])
@pytest.mark.parametrize("block_size", [4, 16])
def test_decode_of_one_and_of_several_tokens(stack, randn, dtype, qlen, block_size):
    lengths = [17, 3, 32]
    (keys, values), caches, table = paged_case(randn, lengths, block_size, dtype=dtype)
    query = randn(3, qlen, 6, 32, dtype=dtype)
    out = decode(query, *caches, lengths, table, qlen)
    for i in range(3):
        expected = formulas.attention(query[i].float(), keys[i].float(), values[i].float(), 32**-0.5)[0]
        assert close(out[i], expected, dtype)


def test_decode_scale_window_and_sink(stack, randn):
    lengths = [9, 30]
    (keys, values), caches, table = paged_case(randn, lengths, 8)
    query, sink = randn(2, 1, 4, 32), randn(4)
    out = decode(query, *caches, lengths, table, scale=0.3, max_window_size=5, sink=sink)
    for i in range(2):
        expected = formulas.attention(query[i], keys[i], values[i], 0.3, window=5, sink=sink)[0]
        assert close(out[i], expected)


def test_older_decode(stack, randn):
    import kunlun_ops

    lengths = [6, 13]
    (keys, values), caches, table = paged_case(randn, lengths, 8)
    query, out, lens = randn(2, 4, 32), torch.empty(2, 4, 32), torch.tensor(lengths, dtype=torch.int32)
    kunlun_ops.paged_attention(
        x=query, k_cache=caches[0], v_cache=caches[1], block_tables=table, context_lens_cpu=lens,
        context_lens_xpu=lens.clone(), is_context=False, is_causal=True, out=out, vo_head_dim=32,
    )  # fmt: skip
    for i in range(2):
        expected = formulas.attention(query[i : i + 1], keys[i], values[i], 32**-0.5)[0]
        assert close(out[i : i + 1], expected)


def test_pad_rows_of_prefill_are_not_written(stack, randn):
    query, key, value = (randn(12, 2, 32) for _ in range(3))
    out = prefill(query, key, value, [4, 3], [4, 3])
    assert not out[:7].isnan().any()
    assert out[7:].isnan().all()


def test_rows_of_empty_contexts_are_not_written(stack, randn):
    lengths = [5, 0, 2]
    _, caches, table = paged_case(randn, lengths, 4)
    out = decode(randn(3, 1, 2, 32), *caches, lengths, table)
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, False]


def test_two_partial_results_merge_into_the_whole(stack, randn):
    import kunlun_ops

    query, key, value = randn(5, 2, 32), randn(14, 2, 32), randn(14, 2, 32)
    parts = [formulas.attention(query, key[s], value[s], 0.2, causal=False) for s in (slice(0, 9), slice(9, 14))]
    whole = formulas.attention(query, key, value, 0.2, causal=False)
    out, lse = torch.empty(5, 2, 32), torch.empty(2, 5)
    kunlun_ops.attention_merge_stage(*parts[0], *parts[1], out, lse)
    assert close(out, whole[0]) and close(lse, whole[1])


def test_empty_part_does_not_weigh_in_the_merge(stack, randn):
    import kunlun_ops

    output, lse, nothing = randn(3, 2, 4), randn(2, 3), torch.full((2, 3), -math.inf)
    out, merged = torch.empty(3, 2, 4), torch.empty(2, 3)
    kunlun_ops.attention_merge_stage(output, lse, torch.zeros(3, 2, 4), nothing, out, merged)
    assert close(out, output) and close(merged, lse)
