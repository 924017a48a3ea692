#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

// Something outside its range: `index` is the token it was found at (-1: all is well), `value` what stood there.
struct OutOfRange {
  int64_t index = -1;
  int64_t value = 0;
  bool found() const { return index >= 0; }
};

// One of the two caches, [num_blocks, heads, block_size, row_bytes]; strides in bytes.
struct CacheWrite {
  char* cache;
  const char* source;
  int64_t block_stride, head_stride, slot_stride;
  int64_t source_token_stride, source_head_stride;
};

struct ReshapeAndCacheArgs {
  CacheWrite key, value;
  const int64_t* slot_mapping;
  int64_t tokens, heads, row_bytes, block_size, num_blocks;
};

struct SlotMappingArgs {
  int64_t* out;
  const int32_t* query_start_loc;
  const int64_t* positions;
  const int32_t* block_table;
  int64_t requests, max_tokens, table_stride, table_columns, block_size, pad_id;
};

struct KvCacheKernels {
  // Copies each token's key and value rows to its slot; negative slots are skipped. Reports a slot outside the cache;
  // the other tokens are written all the same.
  OutOfRange (*reshape_and_cache)(const ReshapeAndCacheArgs&);
  // Reports the first position (with its token) that lies outside the block table.
  OutOfRange (*slot_mapping)(const SlotMappingArgs&);
};

KUNLUN_DECLARE_TABLE(KvCacheKernels, kv_cache_kernels)

}  // namespace kunlun
