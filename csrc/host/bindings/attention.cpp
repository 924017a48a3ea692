#include "kernels/attention.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/common.h"

namespace kunlun {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A float32 copy of a small per-head tensor, kept for the length of the call in memory that is reused.
const float* per_head(const char* op, const OptionalTensor& tensor, const char* argument, int64_t heads,
                      std::vector<float>& memory) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == heads, op, ": ", argument, " must be of shape [", heads,
              "], one value a head, not ", tensor->sizes());
  const DType dtype = dtype_of(*tensor, op, argument);
  memory.resize(static_cast<size_t>(heads));
  const int64_t stride = tensor->stride(0);
  for (int64_t h = 0; h < heads; ++h) {
    if (dtype == DType::kFloat32) {
      memory[h] = tensor->const_data_ptr<float>()[h * stride];
    } else if (dtype == DType::kBFloat16) {
      memory[h] = static_cast<float>(tensor->const_data_ptr<at::BFloat16>()[h * stride]);
    } else {
      memory[h] = static_cast<float>(tensor->const_data_ptr<at::Half>()[h * stride]);
    }
  }
  return memory.data();
}

struct PerHead {
  std::vector<float> alibi, sinks;
};

PerHead& per_head_memory() {
  static thread_local PerHead memory;
  return memory;
}

const int32_t* starts_of(const char* op, const at::Tensor& starts, const char* argument, const char* rows_name,
                         int64_t rows) {
  TORCH_CHECK(starts.scalar_type() == at::kInt && starts.dim() == 1 && starts.is_contiguous() && starts.numel() >= 1,
              op, ": ", argument, " must be contiguous int32 [requests + 1], not ", starts.scalar_type(), " ",
              starts.sizes());
  const int32_t* p = starts.const_data_ptr<int32_t>();
  const int64_t n = starts.numel();
  TORCH_CHECK(p[0] == 0 && std::is_sorted(p, p + n), op, ": ", argument, " must rise from 0");
  TORCH_CHECK(p[n - 1] <= rows, op, ": ", argument, " ends at ", p[n - 1], ", but ", rows_name, " has ", rows, " rows");
  return p;
}

void check_heads(const char* op, const AttentionArgs& a, const at::Tensor& query, const at::Tensor& key,
                 const at::Tensor& value) {
  TORCH_CHECK(key.sizes() == value.sizes(), op, ": keys are of shape ", key.sizes(), ", values of ", value.sizes());
  TORCH_CHECK(key.size(-1) == a.head_size, op, ": the head size of query is ", a.head_size, ", that of the keys ",
              key.size(-1));
  TORCH_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, op, ": query has ", a.heads,
              " heads, which is no multiple of the ", a.kv_heads, " KV heads");
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(), op, ": query is ",
              query.scalar_type(), ", keys ", key.scalar_type(), ", values ", value.scalar_type(),
              "; they must be of one type");
}

// What both ops share. `key` and `value` have the KV heads at dimension 1.
AttentionArgs common_args(const char* op, const at::Tensor& out, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, double scale, double softcap, const OptionalTensor& alibi,
                          const OptionalTensor& sinks) {
  TORCH_CHECK(query.dim() == 3 && out.sizes() == query.sizes() && out.scalar_type() == query.scalar_type(), op,
              ": query must be [tokens, heads, head_size] and out the same, not ", query.sizes(), " ",
              query.scalar_type(), " and ", out.sizes(), " ", out.scalar_type());
  TORCH_CHECK(softcap >= 0.0, op, ": softcap must be 0 (none) or positive, not ", softcap);
  check_rows(out, op, "out");
  check_rows(query, op, "query");
  check_rows(key, op, "key");
  check_rows(value, op, "value");
  AttentionArgs a{};
  a.out = out.data_ptr();
  a.query = query.const_data_ptr();
  a.out_token = out.stride(0);
  a.out_head = out.stride(1);
  a.query_token = query.stride(0);
  a.query_head = query.stride(1);
  a.tokens = query.size(0);
  a.heads = query.size(1);
  a.head_size = query.size(2);
  a.kv_heads = key.size(1);
  check_heads(op, a, query, key, value);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.alibi = per_head(op, alibi, "alibi_slopes", a.heads, per_head_memory().alibi);
  a.sinks = per_head(op, sinks, "sinks", a.heads, per_head_memory().sinks);
  a.dtype = dtype_of(query, op, "query");
  return a;
}

void check_lengths(const char* op, const AttentionArgs& a, int64_t columns) {
  for (int64_t r = 0; r < a.requests; ++r) {
    if (a.query_start[r] == a.query_start[r + 1]) continue;
    TORCH_CHECK(a.seq_lens[r] >= 0 && a.seq_lens[r] <= columns * a.block_size, op, ": seq_lens[", r, "] is ",
                a.seq_lens[r], ", but block_table has room for ", columns, " blocks of ", a.block_size, " tokens");
  }
}

KvRows paged_rows(const at::Tensor& cache) {
  return {cache.const_data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

void set_pages(const char* op, AttentionArgs& a, const at::Tensor& key_cache, const at::Tensor& value_cache,
               const at::Tensor& block_table, const at::Tensor& seq_lens) {
  TORCH_CHECK(block_table.scalar_type() == at::kInt && block_table.dim() == 2 && block_table.size(0) >= a.requests, op,
              ": block_table must be int32 [at least ", a.requests, ", max_blocks], not ", block_table.scalar_type(),
              " ", block_table.sizes());
  TORCH_CHECK(seq_lens.scalar_type() == at::kInt && seq_lens.is_contiguous() && seq_lens.numel() >= a.requests, op,
              ": seq_lens must be contiguous int32 with at least ", a.requests, " entries, not ",
              seq_lens.scalar_type(), " ", seq_lens.sizes());
  check_rows(block_table, op, "block_table");
  a.key = paged_rows(key_cache);
  a.value = paged_rows(value_cache);
  a.block_table = block_table.const_data_ptr<int32_t>();
  a.table_stride = block_table.stride(0);
  a.num_blocks = key_cache.size(0);
  a.block_size = key_cache.size(2);
  a.seq_lens = seq_lens.const_data_ptr<int32_t>();
  check_lengths(op, a, a.num_blocks > 0 ? block_table.size(1) : 0);
}

void paged_attention(at::Tensor out, const at::Tensor& query, const at::Tensor& key_cache,
                     const at::Tensor& value_cache, const at::Tensor& block_table, const at::Tensor& query_start_loc,
                     const at::Tensor& seq_lens, double scale, bool causal, int64_t window_left, double softcap,
                     const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, const OptionalTensor&,
                     const OptionalTensor&) {
  constexpr const char* op = "paged_attention";
  TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, op, ": the caches must be [num_blocks, kv_heads, ",
              "block_size, head_size], not ", key_cache.sizes(), " and ", value_cache.sizes());
  AttentionArgs a = common_args(op, out, query, key_cache, value_cache, scale, softcap, alibi_slopes, sinks);
  a.query_start = starts_of(op, query_start_loc, "query_start_loc", "query", a.tokens);
  a.requests = query_start_loc.numel() - 1;
  a.window_left = window_left;
  a.window_right = causal ? 0 : -1;
  set_pages(op, a, key_cache, value_cache, block_table, seq_lens);
  const BadBlock bad = best_attention_kernels().attention(a);
  TORCH_CHECK(!bad.found(), op, ": block_table[", bad.request, ", ", bad.column, "] is ", bad.id,
              ", but the cache has ", a.num_blocks, " blocks");
}

KvRows packed_rows(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), 0, tensor.stride(1), tensor.stride(0)};
}

void varlen_attention(at::Tensor out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& query_start_loc, const at::Tensor& key_start_loc, double scale, bool causal,
                      int64_t window_left, int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
                      const OptionalTensor& sinks, const OptionalTensor&, const OptionalTensor&) {
  constexpr const char* op = "varlen_attention";
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3, op, ": key and value must be [tokens, kv_heads, head_size], not ",
              key.sizes(), " and ", value.sizes());
  AttentionArgs a = common_args(op, out, query, key, value, scale, softcap, alibi_slopes, sinks);
  a.query_start = starts_of(op, query_start_loc, "query_start_loc", "query", a.tokens);
  a.key_start = starts_of(op, key_start_loc, "key_start_loc", "key", key.size(0));
  a.requests = query_start_loc.numel() - 1;
  TORCH_CHECK(key_start_loc.numel() == a.requests + 1, op, ": query_start_loc has ", a.requests,
              " requests, key_start_loc ", key_start_loc.numel() - 1);
  a.key = packed_rows(key);
  a.value = packed_rows(value);
  a.window_left = window_left;
  a.window_right = causal ? 0 : window_right;
  best_attention_kernels().attention(a);
}

}  // namespace

KUNLUN_HOST_OP(paged_attention, paged_attention)
KUNLUN_HOST_OP(varlen_attention, varlen_attention)

}  // namespace kunlun
