"""Emulated cache writes and block copies against loops over tokens."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def written_by_loop(cache, new, slots, block_size):
    """cache [NB, Hk, BS, D]; what a slot-by-slot copy gives."""
    cache = cache.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // block_size, :, slot % block_size] = new[row]
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_keys_and_values_go_to_their_slots(stack, randn, dtype, heads, slot_dtype):
    import kunlun_ops

    slots = [9, -1, 0, 22, 4]
    key, value = randn(5, heads, 8, dtype=dtype), randn(5, heads, 8, dtype=dtype)
    cache = randn(2, 6, heads, 4, 8, dtype=dtype)
    expected = [written_by_loop(half, new, slots, 4) for half, new in zip(cache, (key, value), strict=True)]
    kunlun_ops.reshape_and_cache(key, value, cache[0], cache[1], torch.tensor(slots, dtype=slot_dtype))
    assert torch.equal(cache, torch.stack(expected))


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_flash_write_takes_both_layouts_and_strided_caches(stack, randn, heads_first, interleaved):
    import kunlun_ops

    slots, heads, block_size = [5, 3, -1, 10], 2, 4
    key, value = randn(4, heads, 6), randn(4, heads, 6)
    inner = (heads, block_size, 6) if heads_first else (block_size, heads, 6)
    buffer = randn(*((3, 2, *inner) if interleaved else (2, 3, *inner)))
    caches = buffer.unbind(1 if interleaved else 0)
    views = [cache if heads_first else cache.transpose(1, 2) for cache in caches]
    expected = [written_by_loop(view, new, slots, block_size) for view, new in zip(views, (key, value), strict=True)]
    kunlun_ops.reshape_and_cache_flash(key, value, *caches, torch.tensor(slots), BLHD_LAYOUT=not heads_first)
    for cache, result in zip(caches, expected, strict=True):
        assert torch.equal(cache if heads_first else cache.transpose(1, 2), result)


def test_blocks_are_swapped_and_copied(stack, randn):
    import kunlun_ops

    source, target, mapping = randn(5, 2, 3), randn(7, 2, 3), torch.tensor([[4, 0], [1, 6]])
    before = target.clone()
    kunlun_ops.swap_blocks(source, target, mapping)
    assert torch.equal(target[0], source[4]) and torch.equal(target[6], source[1])
    assert torch.equal(target[1:6], before[1:6])
    keys, values = [randn(4, 2)], [randn(4, 2)]
    kept = keys[0][1].clone(), values[0][1].clone()
    kunlun_ops.copy_blocks(keys, values, torch.tensor([[1, 3]]))
    assert torch.equal(keys[0][3], kept[0]) and torch.equal(values[0][3], kept[1])


def test_slots_of_several_cache_groups(stack):
    import kunlun_ops

    tables = [
        torch.tensor([[7, 2], [5, 1]], dtype=torch.int32),
        torch.tensor([[3, 4, 9], [8, 6, 0]], dtype=torch.int32),
    ]
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    positions = torch.tensor([4, 5, 0, 99])
    slots = torch.empty(2, 6, dtype=torch.int64)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    kunlun_ops.compute_slot_mappings(rows, starts, positions, tables, [4, 2], slots)
    first = [1 * 4 + 0, 1 * 4 + 1, 7 * 4 + 0]
    second = [0 * 2 + 0, 0 * 2 + 1, 3 * 2 + 0]
    assert slots.tolist() == [[*first, -1, -1, -1], [*second, -1, -1, -1]]


def test_slots_past_the_block_table_are_refused(stack):
    import kunlun_ops

    arguments = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8])
    with pytest.raises(ValueError, match="outside the block table"):
        table = torch.zeros(1, 2, dtype=torch.int32)
        kunlun_ops.compute_slot_mappings(*arguments, [table], [4], torch.empty(1, 1, dtype=torch.int64))


def test_bytes_are_copied_between_addresses(stack):
    source, target = torch.arange(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    pointers = [
        torch.tensor([t.data_ptr() + 4 * i for i in places]) for t, places in ((source, (2, 7)), (target, (0, 5)))
    ]
    torch.ops.xspeedgate_ops.batch_memcpy(*pointers, torch.tensor([8, 12]))
    assert target.tolist() == [2, 3, 0, 0, 0, 7, 8, 9, 0, 0]


def test_overlapping_copies_are_refused(stack):
    address = torch.tensor([torch.zeros(8).data_ptr()])
    with pytest.raises(ValueError, match="overlap"):
        torch.ops.xspeedgate_ops.batch_memcpy(address, address + 4, torch.tensor([8]))


def test_weak_reference_is_the_same_memory(stack, randn):
    for tensor in (
        randn(4, 6).t(),
        torch.arange(5, dtype=torch.int64),
        torch.zeros(0, 3),
        randn(3, dtype=torch.bfloat16),
    ):
        alias = torch.ops.xspeedgate_ops.weak_ref_tensor(tensor)
        assert torch.equal(alias, tensor) and alias.dtype == tensor.dtype
        if tensor.numel():
            tensor.fill_(3)
            assert torch.equal(alias, tensor)
            assert alias.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_vocabulary_shard_with_padding_and_added_tokens(stack):
    ids = torch.tensor([[0, 9, 10, 19], [20, 32, 33, 40]])
    local, outside = torch.ops.xspeedgate_ops.get_masked_input_and_mask(ids, 10, 20, 6, 32, 36)
    # This rank holds 10..19 in rows 0..9, six rows of padding, then 32..35 in rows 16..19.
    expected = {10: 0, 19: 9, 32: 16, 33: 17}
    assert local.flatten().tolist() == [expected.get(token, 0) for token in ids.flatten().tolist()]
    assert outside.flatten().tolist() == [token not in expected for token in ids.flatten().tolist()]
