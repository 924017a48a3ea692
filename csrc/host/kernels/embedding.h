#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

// Ids are int64 where `wide`, else int32.
struct TokenIds {
  const void* data;
  int64_t count;
  bool wide;
};

// out[t] = weight[ids[t]]; strides are in bytes.
struct EmbeddingArgs {
  void* out;
  const void* weight;
  TokenIds ids;
  int64_t row_bytes, out_stride, weight_stride, vocab;
};

// The part of a padded vocabulary that this rank holds: original ids, their padding, then ids added by adapters.
struct VocabShard {
  int64_t org_start, org_end, num_org_padding, added_start, added_end;
};

struct EmbeddingKernels {
  // Place of the first id outside the table, or -1 when all rows were copied; nothing is written in the first case.
  int64_t (*embedding)(const EmbeddingArgs&);
  // local_ids (of the ids' type): row in the shard, 0 outside it. outside: 1 for ids that another rank holds.
  void (*vocab_parallel_mask)(void* local_ids, uint8_t* outside, const TokenIds& ids, const VocabShard& shard);
};

KUNLUN_DECLARE_TABLE(EmbeddingKernels, embedding_kernels)

}  // namespace kunlun
