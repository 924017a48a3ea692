// Flash attention (Dao et al., 2022) of a block of columns, that is query rows times the heads of one KV head's group,
// against a range of keys. Logits are held transposed, [keys][columns]: the columns are the vector lanes, so the
// softmax over the keys needs no horizontal operation and head sizes need not divide the vector length. Columns are
// worked on in groups, so that a group's logits, weights and results stay in the first-level cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "kernels/attention_input.h"
#include "kernels/attention_tiles.h"

namespace kunlun::KUNLUN_ISA {

// Results are rescaled only when the maximum has grown by this many powers of two: float32 has room to spare.
constexpr float kRescaleAt = 8.0f;

template <typename T, typename Tiles>
class ColumnAttention {
 public:
  using Unit = typename Tiles::Unit;
  static constexpr int64_t kGroup = Tiles::kGroup;

  ColumnAttention(const AttentionArgs& args, const AttentionItem& item, Scratch& scratch)
      : in_(args, item), tiles_(args.head_size), groups_((item.columns + kGroup - 1) / kGroup) {
    multiplier_ = args.scale * kLog2e;
    carve(scratch.reserve(carve(nullptr)));
  }

  // Returns the last block id that lay outside the cache.
  BadBlock run(const Partials& partials) {
    for (int64_t g = 0; g < groups_; ++g) start(group(g));
    for (int64_t key = in_.item.key_begin; key < in_.item.key_end; key += kTileKeys) {
      tile(key, std::min<int64_t>(kTileKeys, in_.item.key_end - key));
    }
    for (int64_t g = 0; g < groups_; ++g) finish(group(g), partials);
    return in_.bad;
  }

 private:
  // A group's buffers. The state is a value a column: keys [begin, end) are seen; `most` and `sum` are the running
  // maximum and sum of the softmax, logits being powers of two.
  struct Group {
    int64_t first, count, vectors;
    Unit* query;
    float *result, *most, *sum, *slope;
    int32_t *begin, *end, *position;
  };

  size_t carve(void* memory) {
    Carver c(memory);
    const int64_t columns = groups_ * kGroup;
    c.take(query_, columns * tiles_.query_units());
    c.take(result_, columns * tiles_.result_rows());
    c.take(keys_, tiles_.key_units());
    c.take(values_, tiles_.value_units());
    c.take(weights_, kTileKeys * kGroup);
    c.take(logits_, kTileKeys * kGroup);
    c.take(rows_, kGroup * std::max(tiles_.query_units(), in_.args.head_size));
    c.take(floats_, 3 * columns);
    c.take(ints_, 3 * columns);
    return c.used();
  }

  Group group(int64_t g) const {
    const int64_t first = g * kGroup, count = std::min<int64_t>(kGroup, in_.item.columns - first);
    float* floats = floats_ + 3 * first;
    int32_t* ints = ints_ + 3 * first;
    return {first,
            count,
            (count + kLanes - 1) / kLanes,
            query_ + first * tiles_.query_units(),
            result_ + first * tiles_.result_rows(),
            floats,
            floats + kGroup,
            floats + 2 * kGroup,
            ints,
            ints + kGroup,
            ints + 2 * kGroup};
  }

  void start(const Group& g) {
    const int64_t columns = g.vectors * kLanes, units = tiles_.query_units();
    Unit* row = reinterpret_cast<Unit*>(rows_);
    for (int64_t c = 0; c < columns; ++c, row += units) {
      const auto place = in_.place(g.first + std::min(c, g.count - 1));  // lanes without a column repeat the last one
      start_column(g, c, place);
      tiles_.query_row(row, in_.template query_row<T>(place));
    }
    transpose(rows_, units, reinterpret_cast<float*>(g.query), kGroup, columns, units);
    std::memset(g.result, 0, sizeof(float) * static_cast<size_t>(kGroup * tiles_.result_rows()));
  }

  void start_column(const Group& g, int64_t c, const AttentionInput::Place& place) {
    g.position[c] = static_cast<int32_t>(place.position);
    g.begin[c] = static_cast<int32_t>(in_.begin_at(place.position));
    g.end[c] = static_cast<int32_t>(in_.end_at(place.position));
    g.most[c] = in_.has_sink() ? in_.args.sinks[place.head] * kLog2e : kNoLogit;
    g.sum[c] = in_.has_sink() ? 1.0f : 0.0f;
    g.slope[c] = in_.args.alibi != nullptr ? in_.args.alibi[place.head] * kLog2e : 0.0f;
  }

  void tile(int64_t key, int64_t n) {
    const T* rows[kTileKeys];
    in_.rows(in_.args.key, key, n, rows);
    tiles_.pack_keys(keys_, rows, n);
    in_.rows(in_.args.value, key, n, rows);
    tiles_.pack_values(values_, rows, n);
    for (int64_t i = 0; i < groups_; ++i) {
      const Group g = group(i);
      const int64_t end = g.end[g.count - 1];  // both limits rise from column to column
      if (key + n <= g.begin[0] || key >= end) continue;
      attend(g, key, std::min(n, end - key));
    }
  }

  void attend(const Group& g, int64_t key, int64_t n) {
    tiles_.logits(keys_, g.query, logits_, n, g.vectors);
    const bool masked = g.end[0] < key + n || g.begin[g.count - 1] > key;
    for (int64_t c = 0; c < g.vectors * kLanes; c += kLanes) {
      const float multiplier = adjust(g, c, key, n);
      if (masked) mask(g, c, key, n);
      raise_maximum(g, c, n, multiplier);
      const Vec sum = exponentials(c, n, load(g.most + c), multiplier);
      store(g.sum + c, load(g.sum + c) + sum);
    }
    tiles_.add_values(values_, weights_, g.result, n, g.vectors);
  }

  // Soft cap and ALiBi. Returns what the logits are yet to be multiplied with.
  float adjust(const Group& g, int64_t c, int64_t key, int64_t n) {
    const float softcap = in_.args.softcap;
    if (softcap > 0.0f) {
      const float inner = in_.args.scale / softcap, outer = softcap * kLog2e;
      each_logit(c, n, [&](Vec x, int64_t) { return tanh(x * inner) * outer; });
    } else if (in_.args.alibi != nullptr || multiplier_ <= 0.0f) {
      each_logit(c, n, [&](Vec x, int64_t) { return x * multiplier_; });
    } else {
      return multiplier_;
    }
    if (in_.args.alibi != nullptr) add_alibi(g, c, key, n);
    return 1.0f;
  }

  template <typename Function>
  void each_logit(int64_t c, int64_t n, Function function) {
    float* logit = logits_ + c;
    for (int64_t k = 0; k < n; ++k, logit += kGroup) store(logit, function(load(logit), k));
  }

  static IVec load_int(const int32_t* p) {
    IVec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }

  void add_alibi(const Group& g, int64_t c, int64_t key, int64_t n) {
    const Vec slope = load(g.slope + c);
    const IVec position = load_int(g.position + c);
    each_logit(c, n, [&](Vec x, int64_t k) {
      const IVec distance = static_cast<int32_t>(key + k) - position;
      return fma(slope, __builtin_convertvector(distance, Vec), x);
    });
  }

  void mask(const Group& g, int64_t c, int64_t key, int64_t n) {
    const IVec begin = load_int(g.begin + c), end = load_int(g.end + c);
    each_logit(c, n, [&](Vec x, int64_t k) {
      const IVec at = static_cast<int32_t>(key + k) - IVec{};
      return (at >= begin) & (at < end) ? x : broadcast(-INFINITY);
    });
  }

  Vec largest(int64_t c, int64_t n) const {
    Vec most[4];
    for (Vec& m : most) m = broadcast(-INFINITY);
    const float* logit = logits_ + c;
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) {
      KUNLUN_UNROLL
      for (int i = 0; i < 4; ++i) most[i] = max(load(logit + (k + i) * kGroup), most[i]);
    }
    for (; k < n; ++k) most[0] = max(load(logit + k * kGroup), most[0]);
    return max(max(most[0], most[1]), max(most[2], most[3]));
  }

  void raise_maximum(const Group& g, int64_t c, int64_t n, float multiplier) {
    const Vec before = load(g.most + c), largest_now = largest(c, n) * multiplier;
    const IVec raise = largest_now > before + kRescaleAt;
    if (!any(raise)) return;
    const Vec most = raise ? largest_now : before;
    const Vec correction = exp2(before - most);
    store(g.most + c, most);
    store(g.sum + c, load(g.sum + c) * correction);
    float* result = g.result + c;
    for (int64_t d = 0; d < in_.args.head_size; ++d) store(result + d * kGroup, load(result + d * kGroup) * correction);
  }

  // Turns logits into weights 2^(logit · multiplier - most), 0 for keys that only fill up a step; returns their sums.
  Vec exponentials(int64_t c, int64_t n, Vec most, float multiplier) {
    const Vec factor = broadcast(multiplier), shift = -most;
    float* logit = logits_ + c;
    for (; n % Tiles::kKeyStep != 0; ++n) store(logit + n * kGroup, broadcast(-INFINITY));
    Unit* to = weights_ + c;
    Vec sums[Tiles::kPerUnit] = {};
    for (int64_t k = 0; k < n; k += Tiles::kPerUnit, to += kGroup) {
      Vec weight[Tiles::kPerUnit];
      KUNLUN_UNROLL
      for (int i = 0; i < Tiles::kPerUnit; ++i) {
        weight[i] = exp2 < Tiles::kPerUnit == 2 > (fma(load(logit + (k + i) * kGroup), factor, shift));
        sums[i] = sums[i] + weight[i];
      }
      store_weights(to, weight);
    }
    return Tiles::kPerUnit == 1 ? sums[0] : sums[0] + sums[Tiles::kPerUnit - 1];
  }

  static void store_weights(float* to, const Vec (&weight)[1]) { store(to, weight[0]); }

  // Two bf16 a unit, rounded to nearest; weights are not negative, so integers do it.
  static void store_weights(uint32_t* to, const Vec (&weight)[2]) {
    const UVec pair = ((reinterpret_cast<UVec>(weight[0]) + 0x8000u) >> 16) |
                      ((reinterpret_cast<UVec>(weight[1]) + 0x8000u) & 0xffff0000u);
    std::memcpy(to, &pair, sizeof(pair));
  }

  void finish(const Group& g, const Partials& partials) {
    const int64_t size = in_.args.head_size;
    transpose(g.result, kGroup, rows_, size, size, g.vectors * kLanes);
    if (partials.rows != nullptr) return finish_partial(g, partials);
    for (int64_t c = 0; c < g.count; ++c) {
      const float scale = g.sum[c] == 0.0f ? 0.0f : 1.0f / g.sum[c];
      from_floats(in_.template out_row<T>(in_.place(g.first + c)), rows_ + c * size, size, scale);
    }
  }

  void finish_partial(const Group& g, const Partials& partials) {
    const int64_t size = in_.args.head_size;
    std::memcpy(partials.rows + g.first * size, rows_, sizeof(float) * static_cast<size_t>(g.count * size));
    for (int64_t c = 0; c < g.count; ++c) {
      partials.stats[2 * (g.first + c)] = g.most[c];
      partials.stats[2 * (g.first + c) + 1] = g.sum[c];
    }
  }

  AttentionInput in_;
  Tiles tiles_;
  int64_t groups_;
  float multiplier_;
  Unit *query_, *keys_, *values_, *weights_;
  float *result_, *logits_, *rows_, *floats_;
  int32_t* ints_;
};

}  // namespace kunlun::KUNLUN_ISA
