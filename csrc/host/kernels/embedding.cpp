#include "kernels/embedding.h"

#include <cstring>

#include "core/thread_pool.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kBytesPerTask = 32768;

template <typename Id>
int64_t first_outside(const Id* ids, int64_t count, int64_t vocab) {
  for (int64_t t = 0; t < count; ++t) {
    if (ids[t] < 0 || static_cast<int64_t>(ids[t]) >= vocab) return t;
  }
  return -1;
}

template <typename Id>
int64_t copy_rows(const EmbeddingArgs& a, const Id* ids) {
  const int64_t bad = first_outside(ids, a.ids.count, a.vocab);
  if (bad >= 0) return bad;
  parallel_ranges(a.ids.count, kBytesPerTask / (a.row_bytes + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(static_cast<char*>(a.out) + t * a.out_stride,
                  static_cast<const char*>(a.weight) + ids[t] * a.weight_stride, static_cast<size_t>(a.row_bytes));
    }
  });
  return -1;
}

int64_t embedding(const EmbeddingArgs& a) {
  return a.ids.wide ? copy_rows(a, static_cast<const int64_t*>(a.ids.data))
                    : copy_rows(a, static_cast<const int32_t*>(a.ids.data));
}

template <typename Id>
void mask(Id* local_ids, uint8_t* outside, const Id* ids, int64_t count, const VocabShard& s) {
  const int64_t added_offset = s.added_start - (s.org_end - s.org_start) - s.num_org_padding;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t id = ids[t];
    const bool original = id >= s.org_start && id < s.org_end;
    const bool added = id >= s.added_start && id < s.added_end;
    const int64_t offset = (original ? s.org_start : 0) + (added ? added_offset : 0);
    local_ids[t] = static_cast<Id>(original || added ? id - offset : 0);
    outside[t] = !(original || added);
  }
}

void vocab_parallel_mask(void* local_ids, uint8_t* outside, const TokenIds& ids, const VocabShard& shard) {
  if (ids.wide) {
    mask(static_cast<int64_t*>(local_ids), outside, static_cast<const int64_t*>(ids.data), ids.count, shard);
  } else {
    mask(static_cast<int32_t*>(local_ids), outside, static_cast<const int32_t*>(ids.data), ids.count, shard);
  }
}

}  // namespace

const EmbeddingKernels embedding_kernels = {embedding, vocab_parallel_mask};

}  // namespace kunlun::KUNLUN_ISA
