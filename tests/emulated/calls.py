"""Calls of the emulated attention with everything that depends on the lengths filled in."""

import torch


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def prefill(query, key, value, query_lengths, key_lengths, block_table=None, out=None, **options):
    """Calls prefill_attention; returns out, which starts as zeros."""
    import kunlun_ops

    out = torch.zeros_like(query) if out is None else out
    queries, keys = offsets(query_lengths), offsets(key_lengths)
    kunlun_ops.prefill_attention(
        q=query, k=key, v=value, out=out, is_causal=options.pop("is_causal", True),
        is_prefix_cache=block_table is not None, block_table=block_table, context_qlen_lod_cpu=queries,
        context_qlen_lod_xpu=queries.clone(), context_kvlen_lod_cpu=keys, context_kvlen_lod_xpu=keys.clone(), **options,
    )  # fmt: skip
    return out


def decode(query, key_cache, value_cache, lengths, block_tables, qlen=1, out=None, **options):
    """Calls speculative_attention for query [B, qlen, H, D]; returns out of the same shape."""
    import kunlun_ops

    out = torch.zeros_like(query) if out is None else out
    lengths = torch.tensor(lengths, dtype=torch.int32)
    batch, _, heads, width = query.shape
    arguments = {
        "out": out.squeeze(1) if qlen == 1 else out, "q": query.transpose(0, 1) if qlen == 1 else query,
        "k_cache": key_cache, "v_cache": value_cache, "context_lens_cpu": lengths, "context_lens_xpu": lengths.clone(),
        "batch_num": batch, "qlen": qlen, "max_context_len": 4096, "head_num": heads, "head_dim": width,
        "scale": 0.0, "kv_head_num": key_cache.shape[1], "block_size": key_cache.shape[2],
        "max_num_blocks_per_seq": block_tables.shape[1], "block_tables": block_tables,
    }  # fmt: skip
    kunlun_ops.speculative_attention(**arguments | options)
    return out
