#include "kernels/kv_cache.h"

#include <atomic>
#include <cstring>

#include "core/thread_pool.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kBytesPerTask = 4096;
constexpr int64_t kChunk = 64;

void copy_row(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + kChunk <= bytes; i += kChunk) std::memcpy(to + i, from + i, kChunk);
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

void write_token(const ReshapeAndCacheArgs& a, const CacheWrite& w, int64_t token, int64_t block, int64_t offset) {
  char* to = w.cache + block * w.block_stride + offset * w.slot_stride;
  const char* from = w.source + token * w.source_token_stride;
  for (int64_t h = 0; h < a.heads; ++h) {
    copy_row(to + h * w.head_stride, from + h * w.source_head_stride, a.row_bytes);
  }
}

OutOfRange reshape_and_cache(const ReshapeAndCacheArgs& a) {
  std::atomic<int64_t> bad{-1};
  const int64_t slots = a.num_blocks * a.block_size;
  const int64_t grain = kBytesPerTask / (2 * a.heads * a.row_bytes + 1) + 1;
  parallel_ranges(a.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = a.slot_mapping[token];
      if (slot < 0) continue;
      if (slot >= slots) {
        bad.store(token, std::memory_order_relaxed);
        continue;
      }
      write_token(a, a.key, token, slot / a.block_size, slot % a.block_size);
      write_token(a, a.value, token, slot / a.block_size, slot % a.block_size);
    }
  });
  const int64_t token = bad.load(std::memory_order_relaxed);
  return token < 0 ? OutOfRange{} : OutOfRange{token, a.slot_mapping[token]};
}

OutOfRange slot_mapping(const SlotMappingArgs& a) {
  int64_t token = 0;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int32_t* row = a.block_table + r * a.table_stride;
    for (; token < a.query_start_loc[r + 1]; ++token) {
      const int64_t position = a.positions[token];
      const int64_t column = position / a.block_size;
      if (position < 0 || column >= a.table_columns) return {token, position};
      a.out[token] = static_cast<int64_t>(row[column]) * a.block_size + position % a.block_size;
    }
  }
  for (; token < a.max_tokens; ++token) a.out[token] = a.pad_id;
  return {};
}

}  // namespace

const KvCacheKernels kv_cache_kernels = {reshape_and_cache, slot_mapping};

}  // namespace kunlun::KUNLUN_ISA
