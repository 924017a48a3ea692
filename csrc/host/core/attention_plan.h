// What an attention call computes, and how it is cut into work items.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dispatch.h"

namespace kunlun {

// Keys or values. Paged: row of key k of a request is block_table[k / block_size] · block + (k % block_size) · slot.
// Packed (block_table is null): (key_start[request] + k) · slot. Strides in elements.
struct KvRows {
  const void* data;
  int64_t block, head, slot;
};

// Attention of `query` [tokens, heads, head_size], request r owning rows query_start[r] to query_start[r + 1]. The last
// query of a request stands at the position of its last key. A query at position p sees the keys from p - window_left
// to p + window_right (negative: no limit). Logits are softcap(q · k · scale) + alibi[h] · (key position - p).
struct AttentionArgs {
  void* out;
  const void* query;
  int64_t out_token, out_head, query_token, query_head;
  KvRows key, value;
  const int32_t* query_start;
  const int32_t* key_start;    // packed keys, or nullptr
  const int32_t* seq_lens;     // paged keys, or nullptr
  const int32_t* block_table;  // paged keys, or nullptr
  int64_t table_stride, block_size, num_blocks;
  int64_t requests, tokens, heads, kv_heads, head_size;
  int64_t window_left, window_right;
  float scale, softcap;  // softcap 0: none
  const float* alibi;    // [heads], or nullptr
  const float* sinks;    // [heads], or nullptr: a logit per head that only adds to the softmax's denominator
  DType dtype;
};

// Queries of one request against one KV head are numbered row by row: column c is query row c / group of head c % group
// in the KV head's group. An item is a range of columns against a range of keys. Where a range of columns is cut into
// several ranges of keys, `partial` is the first of the item's rows in the buffer of partial results, else -1; the sink
// belongs to the first piece.
struct AttentionItem {
  int32_t request, kv_head;
  int32_t column, columns;
  int32_t key_begin, key_end;
  int64_t partial;
  bool first_piece;
};

// The partial results of `pieces` consecutive items, to be merged.
struct AttentionMerge {
  int32_t first_item, pieces;
};

struct AttentionPlan {
  ~AttentionPlan();  // not inline: it must not be compiled for one instruction set and used by another

  std::vector<AttentionItem> items;
  std::vector<AttentionMerge> merges;
  int64_t partial_rows = 0;
};

struct PlanLimits {
  int64_t most_columns;   // of an item: many share the work of reading a key,
  int64_t least_columns;  // but not so many that threads stay idle, down to this
  int64_t lanes;          // an item's columns are a multiple of this where possible
  int64_t least_keys;     // a range of keys is not cut into pieces shorter than this
  int64_t threads;
};

// Fills `plan`; its memory is reused from call to call.
void plan_attention(const AttentionArgs& args, const PlanLimits& limits, AttentionPlan& plan);

}  // namespace kunlun
