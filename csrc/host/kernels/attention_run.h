// Runs an attention call: plans the items, computes them on all threads, merges what was cut.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "core/thread_pool.h"
#include "kernels/attention_columns.h"
#include "kernels/attention_rows.h"

namespace kunlun::KUNLUN_ISA {

constexpr int64_t kMostColumns = 256, kLeastColumns = 64;
constexpr int64_t kLeastKeys = 256;

inline Partials reserve_partials(const AttentionPlan& plan, int64_t head_size) {
  static thread_local Scratch scratch;
  if (plan.partial_rows == 0) return {};
  const int64_t floats = plan.partial_rows * (head_size + 2);
  float* memory = static_cast<float*>(scratch.reserve(static_cast<size_t>(floats) * sizeof(float)));
  return {memory, memory + plan.partial_rows * head_size};
}

// Items of at most `kRows` columns are computed row by row with Dots, the others by columns with Tiles.
template <typename T_, typename Tiles_, typename Dots_, int64_t kRows_>
struct Method {
  using T = T_;
  using Tiles = Tiles_;
  using Dots = Dots_;
  static constexpr int64_t kRows = kRows_;
};

template <typename M>
BadBlock run_item(const AttentionArgs& a, const AttentionItem& item, const Partials& all) {
  static thread_local Scratch scratch;
  Partials own;
  if (item.partial >= 0) own = {all.rows + item.partial * a.head_size, all.stats + item.partial * 2};
  if (item.columns <= M::kRows) return RowAttention<typename M::T, typename M::Dots>(a, item, scratch).run(own);
  return ColumnAttention<typename M::T, typename M::Tiles>(a, item, scratch).run(own);
}

// One row from its pieces, `stride` rows apart: each is scaled to the largest maximum, then divided by the sum of sums.
template <typename T>
void merge_row(const AttentionArgs& a, const Partials& all, int64_t first, int64_t stride, int64_t pieces, T* out) {
  float most = kNoLogit, sum = 0.0f;
  for (int64_t p = 0; p < pieces; ++p) most = std::max(most, all.stats[2 * (first + p * stride)]);
  float* total = all.rows + first * a.head_size;
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t row = first + p * stride;
    const float factor = std::exp2(all.stats[2 * row] - most);
    sum += all.stats[2 * row + 1] * factor;
    const float* part = all.rows + row * a.head_size;
    for (int64_t d = 0; d < a.head_size; ++d) total[d] = p == 0 ? part[d] * factor : total[d] + part[d] * factor;
  }
  from_floats(out, total, a.head_size, sum == 0.0f ? 0.0f : 1.0f / sum);
}

template <typename T>
void merge(const AttentionArgs& a, const AttentionItem* items, int64_t pieces, const Partials& all) {
  const AttentionInput in(a, items[0]);
  for (int64_t c = 0; c < in.item.columns; ++c) {
    merge_row(a, all, in.item.partial + c, in.item.columns, pieces, in.out_row<T>(in.place(c)));
  }
}

template <typename T>
void clear_padding(const AttentionArgs& a) {
  for (int64_t token = a.query_start[a.requests]; token < a.tokens; ++token) {
    for (int64_t h = 0; h < a.heads; ++h) {
      T* out = static_cast<T*>(a.out) + token * a.out_token + h * a.out_head;
      std::memset(out, 0, static_cast<size_t>(a.head_size) * sizeof(T));
    }
  }
}

template <typename M>
BadBlock run_attention(const AttentionArgs& a) {
  static thread_local AttentionPlan plan_of_thread;
  AttentionPlan& plan = plan_of_thread;  // the workers must see this thread's
  plan_attention(a, {kMostColumns, kLeastColumns, kLanes, kLeastKeys, num_threads()}, plan);
  const Partials partials = reserve_partials(plan, a.head_size);
  BadBlock bad;
  std::mutex mutex;
  parallel_for(static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
    const BadBlock found = run_item<M>(a, plan.items[i], partials);
    if (!found.found()) return;
    std::lock_guard<std::mutex> lock(mutex);
    bad = found;
  });
  parallel_for(static_cast<int64_t>(plan.merges.size()), [&](int64_t i) {
    merge<typename M::T>(a, &plan.items[plan.merges[i].first_item], plan.merges[i].pieces, partials);
  });
  clear_padding<typename M::T>(a);
  return bad;
}

}  // namespace kunlun::KUNLUN_ISA
