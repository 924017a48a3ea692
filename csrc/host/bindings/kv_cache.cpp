#include "kernels/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings/common.h"

namespace kunlun {
namespace {

void check_pair(const char* op, const at::Tensor& cache, const at::Tensor& source, const char* argument) {
  TORCH_CHECK(cache.dim() == 4 && source.dim() == 3, op, ": the ", argument, " cache must be [num_blocks, kv_heads, ",
              "block_size, head_size] and ", argument, " [tokens, kv_heads, head_size], not ", cache.sizes(), " and ",
              source.sizes());
  TORCH_CHECK(cache.size(1) == source.size(1) && cache.size(3) == source.size(2), op, ": ", argument, " has ",
              source.size(1), " heads of size ", source.size(2), ", its cache ", cache.size(1), " of size ",
              cache.size(3));
  TORCH_CHECK(cache.scalar_type() == source.scalar_type(), op, ": ", argument, " is ", source.scalar_type(),
              " and its cache ", cache.scalar_type(), "; they must be of one type");
  check_rows(cache, op, argument);
  check_rows(source, op, argument);
}

CacheWrite cache_write(const at::Tensor& cache, const at::Tensor& source) {
  const int64_t size = source.element_size();
  return {static_cast<char*>(cache.data_ptr()),
          static_cast<const char*>(source.const_data_ptr()),
          cache.stride(0) * size,
          cache.stride(1) * size,
          cache.stride(2) * size,
          source.stride(0) * size,
          source.stride(1) * size};
}

void reshape_and_cache(at::Tensor key_cache, at::Tensor value_cache, const at::Tensor& key, const at::Tensor& value,
                       const at::Tensor& slot_mapping) {
  constexpr const char* op = "reshape_and_cache";
  check_pair(op, key_cache, key, "key");
  check_pair(op, value_cache, value, "value");
  TORCH_CHECK(key_cache.sizes() == value_cache.sizes() && key.sizes() == value.sizes() &&
                  key.scalar_type() == value.scalar_type(),
              op, ": key and value must have one shape and type, and so must their caches");
  TORCH_CHECK(
      slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous() && slot_mapping.numel() >= key.size(0),
      op, ": slot_mapping must be contiguous int64 with at least ", key.size(0), " entries, not ",
      slot_mapping.scalar_type(), " ", slot_mapping.sizes());
  ReshapeAndCacheArgs a{};
  a.key = cache_write(key_cache, key);
  a.value = cache_write(value_cache, value);
  a.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  a.tokens = key.size(0);
  a.heads = key.size(1);
  a.row_bytes = key.size(2) * key.element_size();
  a.block_size = key_cache.size(2);
  a.num_blocks = key_cache.size(0);
  const OutOfRange bad = kv_cache_kernels_for(active_isa()).reshape_and_cache(a);
  TORCH_CHECK(!bad.found(), op, ": slot_mapping[", bad.index, "] is ", bad.value, ", but the cache has only ",
              a.num_blocks * a.block_size, " slots");
}

void check_mapping(const char* op, const at::Tensor& out, const at::Tensor& starts, const at::Tensor& positions,
                   const at::Tensor& block_table, int64_t block_size) {
  TORCH_CHECK(out.scalar_type() == at::kLong && positions.scalar_type() == at::kLong && out.is_contiguous() &&
                  positions.is_contiguous(),
              op, ": out and positions must be contiguous int64, not ", out.scalar_type(), " and ",
              positions.scalar_type());
  TORCH_CHECK(starts.scalar_type() == at::kInt && starts.is_contiguous() && starts.numel() >= 1, op,
              ": query_start_loc must be contiguous int32 with at least one entry, not ", starts.scalar_type(), " ",
              starts.sizes());
  TORCH_CHECK(block_table.scalar_type() == at::kInt && block_table.dim() == 2, op,
              ": block_table must be int32 [requests, max_blocks], not ", block_table.scalar_type(), " ",
              block_table.sizes());
  check_rows(block_table, op, "block_table");
  TORCH_CHECK(block_size >= 1, op, ": block_size must be positive, not ", block_size);
  TORCH_CHECK(block_table.size(0) >= starts.numel() - 1, op, ": block_table has ", block_table.size(0),
              " rows for the ", starts.numel() - 1, " requests of query_start_loc");
}

void slot_mapping(at::Tensor out, const at::Tensor& query_start_loc, const at::Tensor& positions,
                  const at::Tensor& block_table, int64_t block_size, int64_t pad_id) {
  constexpr const char* op = "slot_mapping";
  check_mapping(op, out, query_start_loc, positions, block_table, block_size);
  SlotMappingArgs a{};
  a.out = out.data_ptr<int64_t>();
  a.query_start_loc = query_start_loc.const_data_ptr<int32_t>();
  a.positions = positions.const_data_ptr<int64_t>();
  a.block_table = block_table.const_data_ptr<int32_t>();
  a.requests = query_start_loc.numel() - 1;
  a.max_tokens = out.numel();
  a.table_stride = block_table.stride(0);
  a.table_columns = block_table.size(1);
  a.block_size = block_size;
  a.pad_id = pad_id;
  const int32_t* starts = a.query_start_loc;
  TORCH_CHECK(starts[0] == 0 && std::is_sorted(starts, starts + a.requests + 1), op,
              ": query_start_loc must rise from 0");
  TORCH_CHECK(starts[a.requests] <= std::min(a.max_tokens, positions.numel()), op, ": query_start_loc ends at ",
              starts[a.requests], ", but out has ", a.max_tokens, " entries and positions ", positions.numel());
  const OutOfRange bad = kv_cache_kernels_for(active_isa()).slot_mapping(a);
  TORCH_CHECK(!bad.found(), op, ": positions[", bad.index, "] is ", bad.value, ", outside the block table's ",
              a.table_columns, " blocks of ", block_size, " tokens");
}

struct Extent {
  int64_t size, stride;
};

// The dimensions of one block in bytes, innermost first, neighbours merged where they lie back to back.
std::vector<Extent> block_extents(const at::Tensor& cache) {
  std::vector<Extent> dims;
  for (int64_t d = 1; d < cache.dim(); ++d) {
    if (cache.size(d) != 1) dims.push_back({cache.size(d), cache.stride(d) * cache.element_size()});
  }
  std::sort(dims.begin(), dims.end(), [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  std::vector<Extent> merged{{cache.element_size(), 1}};
  for (const Extent& dim : dims) {
    Extent& last = merged.back();
    if (dim.stride == last.size * last.stride) {
      last.size *= dim.size;
    } else {
      merged.push_back(dim);
    }
  }
  return merged;
}

void zero_extents(char* start, const Extent* innermost, const Extent* extent) {
  if (extent == innermost) {
    std::memset(start, 0, static_cast<size_t>(extent->size));
    return;
  }
  for (int64_t i = 0; i < extent->size; ++i) zero_extents(start + i * extent->stride, innermost, extent - 1);
}

template <typename Index>
void zero_blocks_of(const at::Tensor& cache, const at::Tensor& block_ids) {
  const Index* ids = block_ids.const_data_ptr<Index>();
  const int64_t count = block_ids.numel();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(ids[i] >= 0 && ids[i] < cache.size(0), "zero_blocks: block_ids[", i, "] is ", ids[i],
                ", but the cache has ", cache.size(0), " blocks");
  }
  if (cache.numel() == 0) return;
  const std::vector<Extent> extents = block_extents(cache);
  char* base = static_cast<char*>(cache.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    zero_extents(base + ids[i] * cache.stride(0) * cache.element_size(), extents.data(), &extents.back());
  }
}

void zero_blocks(at::Tensor kv_cache, const at::Tensor& block_ids) {
  TORCH_CHECK(kv_cache.dim() >= 1, "zero_blocks: kv_cache must have a dimension of blocks");
  TORCH_CHECK(block_ids.dim() == 1 && block_ids.is_contiguous(), "zero_blocks: block_ids must be contiguous [n], not ",
              block_ids.sizes());
  if (block_ids.scalar_type() == at::kInt) return zero_blocks_of<int32_t>(kv_cache, block_ids);
  TORCH_CHECK(block_ids.scalar_type() == at::kLong, "zero_blocks: block_ids must be int32 or int64, not ",
              block_ids.scalar_type());
  zero_blocks_of<int64_t>(kv_cache, block_ids);
}

}  // namespace

KUNLUN_HOST_OP(reshape_and_cache, reshape_and_cache)
KUNLUN_HOST_OP(slot_mapping, slot_mapping)
KUNLUN_HOST_OP(zero_blocks, zero_blocks)

}  // namespace kunlun
