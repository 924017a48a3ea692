#include "kernels/attention.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/thread_pool.h"
#include "kernels/attention_columns.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kColumns = 64;
constexpr int64_t kMinKeys = 256;

// Partial results, [partial_rows, head_size] and a maximum and a sum a row.
struct Partials {
  float *rows = nullptr, *stats = nullptr;
};

Partials reserve_partials(const AttentionPlan& plan, int64_t head_size) {
  static thread_local Scratch scratch;
  if (plan.partial_rows == 0) return {};
  const int64_t floats = plan.partial_rows * (head_size + 2);
  float* memory = static_cast<float*>(scratch.reserve(static_cast<size_t>(floats) * sizeof(float)));
  return {memory, memory + plan.partial_rows * head_size};
}

template <typename T, typename Math>
BadBlock run_item(const AttentionArgs& a, const AttentionItem& item, const Partials& partials) {
  static thread_local Scratch scratch;
  ColumnAttention<T, Math> attention(a, item, scratch);
  if (item.partial < 0) return attention.run(nullptr, nullptr);
  return attention.run(partials.rows + item.partial * a.head_size, partials.stats + item.partial * 2);
}

// One row from its pieces: each is scaled to the largest maximum, then divided by the sum of the sums.
template <typename T>
void merge_row(const AttentionArgs& a, const Partials& partials, int64_t first, int64_t stride, int64_t pieces, T* out) {
  const float* stats = partials.stats;
  float most = kNoLogit;
  for (int64_t p = 0; p < pieces; ++p) most = std::max(most, stats[2 * (first + p * stride)]);
  float* total = partials.rows + first * a.head_size;
  float sum = 0.0f;
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t row = first + p * stride;
    const float factor = std::exp2(stats[2 * row] - most);
    sum += stats[2 * row + 1] * factor;
    const float* part = partials.rows + row * a.head_size;
    for (int64_t d = 0; d < a.head_size; ++d) total[d] = p == 0 ? part[d] * factor : total[d] + part[d] * factor;
  }
  from_floats(out, total, a.head_size, sum == 0.0f ? 0.0f : 1.0f / sum);
}

template <typename T>
void merge(const AttentionArgs& a, const AttentionPlan& plan, const AttentionMerge& m, const Partials& partials) {
  const AttentionItem& item = plan.items[m.first_item];
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t c = 0; c < item.columns; ++c) {
    const int64_t token = a.query_start[item.request] + (item.column + c) / group;
    const int64_t head = item.kv_head * group + (item.column + c) % group;
    T* out = static_cast<T*>(a.out) + token * a.out_token + head * a.out_head;
    merge_row(a, partials, item.partial + c, item.columns, m.pieces, out);
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

template <typename T, typename Math>
BadBlock run(const AttentionArgs& a) {
  static thread_local AttentionPlan plan_of_thread;
  AttentionPlan& plan = plan_of_thread;
  plan_attention(a, {kColumns, kLanes, kMinKeys, num_threads()}, plan);
  const Partials partials = reserve_partials(plan, a.head_size);
  BadBlock first_bad;
  std::mutex mutex;
  parallel_for(static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
    const BadBlock bad = run_item<T, Math>(a, plan.items[i], partials);
    if (!bad.found()) return;
    std::lock_guard<std::mutex> lock(mutex);
    first_bad = bad;
  });
  parallel_for(static_cast<int64_t>(plan.merges.size()),
               [&](int64_t i) { merge<T>(a, plan, plan.merges[i], partials); });
  clear_padding<T>(a);
  return first_bad;
}

BadBlock attention(const AttentionArgs& a) {
  BadBlock bad;
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, {
    bad = a.head_size % 2 == 0 ? run<T, typename MathOf<T, true>::type>(a) : run<T, typename MathOf<T, false>::type>(a);
  });
  return bad;
}

}  // namespace

const AttentionKernels attention_kernels = {attention};

}  // namespace kunlun::KUNLUN_ISA
