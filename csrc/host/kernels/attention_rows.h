// Attention of a few query rows (a decode step: the heads of one KV head's group) in one pass over keys and values.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "kernels/attention_dots.h"
#include "kernels/attention_input.h"

namespace kunlun::KUNLUN_ISA {

template <typename T, typename Dots>
class RowAttention {
 public:
  RowAttention(const AttentionArgs& args, const AttentionItem& item, Scratch& scratch)
      : in_(args, item), dots_(args.head_size, item.columns) {
    carve(scratch.reserve(carve(nullptr)));
  }

  // Returns the last block id that lay outside the cache.
  BadBlock run(const Partials& partials) {
    std::memset(query_, 0, sizeof(Query) * static_cast<size_t>(dots_.query_size()));
    std::memset(result_, 0, sizeof(float) * static_cast<size_t>(in_.item.columns * dots_.stride()));
    for (int64_t r = 0; r < in_.item.columns; ++r) start(r);
    for (int64_t key = in_.item.key_begin; key < in_.item.key_end; key += kSpanKeys) {
      span(key, std::min<int64_t>(kSpanKeys, in_.item.key_end - key));
    }
    for (int64_t r = 0; r < in_.item.columns; ++r) finish(r, partials);
    return in_.bad;
  }

 private:
  using Query = typename Dots::Query;
  using Weight = typename Dots::Weight;

  // A row's range of visible keys, and the running maximum and sum of its softmax; logits are powers of two.
  struct State {
    int64_t position, begin, end;
    float most, sum, slope;
  };

  size_t carve(void* memory) {
    Carver c(memory);
    const int64_t rows = in_.item.columns;
    c.take(query_, dots_.query_size());
    c.take(result_, rows * dots_.stride());
    c.take(logits_, rows * kSpanKeys);
    c.take(weights_, rows * kSpanKeys);
    c.take(states_, rows);
    return c.used();
  }

  void start(int64_t r) {
    const auto place = in_.place(r);
    dots_.pack_query(query_, r, in_.template query_row<T>(place));
    State& s = states_[r];
    s.position = place.position;
    s.begin = in_.begin_at(place.position);
    s.end = in_.end_at(place.position);
    s.most = in_.has_sink() ? in_.args.sinks[place.head] * kLog2e : kNoLogit;
    s.sum = in_.has_sink() ? 1.0f : 0.0f;
    s.slope = in_.args.alibi != nullptr ? in_.args.alibi[place.head] * kLog2e : 0.0f;
  }

  void span(int64_t key, int64_t n) {
    const T *keys[kSpanKeys], *values[kSpanKeys];
    const int64_t whole = (n + Dots::kKeyStep - 1) / Dots::kKeyStep * Dots::kKeyStep;
    read_rows(in_.args.key, key, n, keys, whole);
    read_rows(in_.args.value, key, n, values, whole);
    for (int64_t k = 0; k < whole; k += Dots::kKeyStep) {
      for (int64_t i = k; i < k + Dots::kKeyStep; ++i) prefetch(values[i]);
      dots_.logits(query_, keys + k, logits_ + k);
    }
    for (int64_t r = 0; r < in_.item.columns; ++r) softmax(r, key, whole);
    dots_.accumulate(result_, weights_, values, whole);
  }

  void prefetch(const T* row) const {
    for (int64_t d = 0; d < in_.args.head_size; d += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(row + d, 0, 2);
    }
  }

  // Row pointers of `n` keys; the last one is repeated up to `whole`.
  void read_rows(const KvRows& source, int64_t key, int64_t n, const T** rows, int64_t whole) {
    in_.rows(source, key, n, rows);
    for (int64_t k = n; k < whole; ++k) rows[k] = rows[n - 1];
  }

  // `whole` logits from that of `key` on; a row sees at most the keys of the span, so this hides what only fills up.
  void softmax(int64_t r, int64_t key, int64_t whole) {
    State& s = states_[r];
    float* logits = logits_ + r * kSpanKeys;
    adjust(s, logits, key, whole);
    for (int64_t k = 0; k < std::min(s.begin - key, whole); ++k) logits[k] = -INFINITY;
    const int64_t end = std::min<int64_t>(s.end, in_.item.key_end);
    for (int64_t k = std::max<int64_t>(end - key, 0); k < whole; ++k) logits[k] = -INFINITY;
    Vec most = broadcast(s.most);
    for (int64_t k = 0; k < whole; k += kLanes) most = max(load(logits + k), most);
    raise_maximum(r, reduce_max(most));
    s.sum += exponentials(r, whole, broadcast(s.most));
  }

  // Scale, soft cap and ALiBi.
  void adjust(const State& s, float* logits, int64_t key, int64_t n) {
    const AttentionArgs& a = in_.args;
    for (int64_t k = 0; k < n; k += kLanes) {
      Vec x = load(logits + k);
      x = a.softcap > 0.0f ? tanh(x * (a.scale / a.softcap)) * (a.softcap * kLog2e) : x * (a.scale * kLog2e);
      if (a.alibi != nullptr) x = fma(broadcast(s.slope), distance(key + k - s.position), x);
      store(logits + k, x);
    }
  }

  static Vec distance(int64_t first) {
    IVec lane{};
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return __builtin_convertvector(lane + static_cast<int32_t>(first), Vec);
  }

  void raise_maximum(int64_t r, float most) {
    State& s = states_[r];
    if (most <= s.most) return;
    const float correction = std::exp2(s.most - most);
    s.most = most;
    s.sum *= correction;
    float* result = result_ + r * dots_.stride();
    for (int64_t d = 0; d < dots_.stride(); d += kLanes) store(result + d, load(result + d) * correction);
  }

  float exponentials(int64_t r, int64_t n, Vec most) {
    const float* logits = logits_ + r * kSpanKeys;
    Weight* weights = weights_ + r * kSpanKeys;
    Vec sum{};
    for (int64_t k = 0; k < n; k += kLanes) {
      const Vec weight = exp2 < sizeof(Weight) == 2 > (load(logits + k) - most);
      sum = sum + weight;
      store(weights + k, weight);
    }
    return reduce_add(sum);
  }

  void finish(int64_t r, const Partials& partials) {
    const State& s = states_[r];
    const int64_t size = in_.args.head_size;
    float* result = result_ + r * dots_.stride();
    dots_.restore_order(result);
    if (partials.rows == nullptr) {
      from_floats(in_.template out_row<T>(in_.place(r)), result, size, s.sum == 0.0f ? 0.0f : 1.0f / s.sum);
      return;
    }
    std::memcpy(partials.rows + r * size, result, sizeof(float) * static_cast<size_t>(size));
    partials.stats[2 * r] = s.most;
    partials.stats[2 * r + 1] = s.sum;
  }

  AttentionInput in_;
  Dots dots_;
  Query* query_;
  float *result_, *logits_;
  Weight* weights_;
  State* states_;
};

}  // namespace kunlun::KUNLUN_ISA
