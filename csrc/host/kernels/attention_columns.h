// Flash attention of a block of columns (query rows times the heads of one KV head's group) against a range of keys.
// Logits are held transposed, [keys][columns]: the columns are the vector lanes, so the softmax over keys needs no
// horizontal operation, and head sizes need not divide the vector length.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "kernels/attention.h"
#include "kernels/attention_math.h"

namespace kunlun::KUNLUN_ISA {

constexpr int64_t kTileKeys = 64;
constexpr float kNoLogit = -1e30f;  // the running maximum before any key was seen

// How one element type is multiplied: MathOf<T, true> is for even head sizes.
template <typename T, bool kEven>
struct MathOf {
  using type = FloatMath;
};
#if defined(__AVX512BF16__)
template <>
struct MathOf<bf16, true> {
  using type = PairMath;
};
#endif

// Row pointers of consecutive keys of one request and KV head.
class KeyReader {
 public:
  KeyReader(const AttentionArgs& args, const AttentionItem& item) : args_(args), item_(item) {}

  // Pointers to the rows of keys [first, first + n). An id outside the cache is reported and read as block 0.
  template <typename T>
  void rows(const KvRows& source, int64_t first, int64_t n, const T** to, BadBlock& bad) const {
    const T* base = static_cast<const T*>(source.data) + item_.kv_head * source.head;
    if (args_.block_table == nullptr) {
      first += args_.key_start[item_.request];
      for (int64_t i = 0; i < n; ++i) to[i] = base + (first + i) * source.slot;
      return;
    }
    for (int64_t i = 0; i < n;) {
      const int64_t column = (first + i) / args_.block_size;
      const T* block = base + block_id(column, bad) * source.block;
      const int64_t end = std::min(n, (column + 1) * args_.block_size - first);
      for (; i < end; ++i) to[i] = block + (first + i - column * args_.block_size) * source.slot;
    }
  }

 private:
  int64_t block_id(int64_t column, BadBlock& bad) const {
    const int64_t id = args_.block_table[item_.request * args_.table_stride + column];
    if (id >= 0 && id < args_.num_blocks) return id;
    bad = {item_.request, column, id};
    return 0;
  }

  const AttentionArgs& args_;
  const AttentionItem& item_;
};

// Per column: the range of keys it sees, its running maximum and sum (in powers of two), its correction.
struct ColumnState {
  int32_t *begin, *end, *position;
  float *most, *sum, *correction, *slope;
};

template <typename Math>
struct ColumnBuffers {
  using Unit = typename Math::Unit;
  Unit *query, *keys, *values, *weights;
  float *logits, *result, *rows;
  ColumnState state;
};

// Cuts one piece of memory into the buffers; called with nullptr it tells the size.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* out = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return out;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

template <typename Math>
size_t carve(ColumnBuffers<Math>& b, char* memory, int64_t columns, int64_t head_size) {
  using Unit = typename Math::Unit;
  Carver c(memory);
  b.query = c.take<Unit>(columns * head_size);
  b.keys = c.take<Unit>(kTileKeys * head_size);
  b.values = c.take<Unit>(kTileKeys * head_size);
  b.weights = c.take<Unit>(kTileKeys * columns);
  b.logits = c.take<float>(kTileKeys * columns);
  b.result = c.take<float>(columns * head_size);
  b.rows = c.take<float>(columns * head_size);
  ColumnState& s = b.state;
  for (int32_t** field : {&s.begin, &s.end, &s.position}) *field = c.take<int32_t>(columns);
  for (float** field : {&s.most, &s.sum, &s.correction, &s.slope}) *field = c.take<float>(columns);
  return c.used();
}

template <typename T, typename Math>
class ColumnAttention {
 public:
  using Unit = typename Math::Unit;

  ColumnAttention(const AttentionArgs& args, const AttentionItem& item, Scratch& scratch)
      : a_(args), item_(item), reader_(args, item), group_(args.heads / args.kv_heads) {
    columns_ = (item.columns + kLanes - 1) / kLanes * kLanes;
    ColumnBuffers<Math> sizes;
    const size_t bytes = carve(sizes, nullptr, columns_, a_.head_size);
    carve(b_, static_cast<char*>(scratch.reserve(bytes)), columns_, a_.head_size);
  }

  // Writes the item's rows of the output, or its partial results: [rows, head_size], and a maximum and a sum a row.
  BadBlock run(float* partial, float* partial_stats) {
    start_columns();
    pack_query();
    bool first = true;
    for (int64_t key = item_.key_begin; key < item_.key_end; key += kTileKeys, first = false) {
      tile(key, std::min<int64_t>(kTileKeys, item_.key_end - key), first);
    }
    if (first) std::memset(b_.result, 0, sizeof(float) * static_cast<size_t>(columns_ * a_.head_size));
    partial == nullptr ? write_out() : write_partial(partial, partial_stats);
    return bad_;
  }

 private:
  int64_t row_of(int64_t column) const { return (item_.column + column) / group_; }
  int64_t head_of(int64_t column) const { return item_.kv_head * group_ + (item_.column + column) % group_; }

  void start_columns() {
    const int64_t keys = a_.seq_lens != nullptr ? a_.seq_lens[item_.request]
                                                : a_.key_start[item_.request + 1] - a_.key_start[item_.request];
    const int64_t offset = keys - (a_.query_start[item_.request + 1] - a_.query_start[item_.request]);
    for (int64_t c = 0; c < columns_; ++c) {
      const int64_t column = std::min<int64_t>(c, item_.columns - 1);
      const int64_t position = offset + row_of(column);
      ColumnState& s = b_.state;
      s.position[c] = static_cast<int32_t>(position);
      s.begin[c] = static_cast<int32_t>(a_.window_left < 0 ? 0 : std::max<int64_t>(0, position - a_.window_left));
      const int64_t end = a_.window_right < 0 ? keys : std::min(keys, position + a_.window_right + 1);
      s.end[c] = static_cast<int32_t>(end);
      const bool sink = a_.sinks != nullptr && item_.first_piece;
      s.most[c] = sink ? a_.sinks[head_of(column)] * kLog2e : kNoLogit;
      s.sum[c] = sink ? 1.0f : 0.0f;
      s.slope[c] = a_.alibi != nullptr ? a_.alibi[head_of(column)] * kLog2e : 0.0f;
    }
  }

  const T* query_row(int64_t column) const {
    const int64_t token = a_.query_start[item_.request] + row_of(column);
    return static_cast<const T*>(a_.query) + token * a_.query_token + head_of(column) * a_.query_head;
  }

  int64_t units() const { return a_.head_size / Math::kPerUnit; }

  // [columns, head_size] to [units, columns]; lanes without a column are zero.
  void pack_query() {
    float* rows = b_.rows;
    for (int64_t c = 0; c < columns_; ++c, rows += units()) {
      if (c < item_.columns) {
        copy_units(reinterpret_cast<Unit*>(rows), query_row(c));
      } else {
        std::memset(rows, 0, sizeof(float) * static_cast<size_t>(units()));
      }
    }
    transpose(b_.rows, units(), reinterpret_cast<float*>(b_.query), columns_, columns_, units());
  }

  void copy_units(Unit* to, const T* from) const {
    if constexpr (Math::kPerUnit == 2) {
      std::memcpy(to, from, static_cast<size_t>(a_.head_size) * sizeof(T));
    } else {
      to_floats(to, from, a_.head_size);
    }
  }

  void tile(int64_t key, int64_t n, bool first) {
    const T* rows[kTileKeys];
    reader_.rows(a_.key, key, n, rows, bad_);
    for (int64_t k = 0; k < n; ++k) copy_units(b_.keys + k * units(), rows[k]);
    reader_.rows(a_.value, key, n, rows, bad_);
    pack_values(rows, n);
    logits(n);
    softmax(key, n);
    add_values(n, first);
  }

  // [keys / kPerUnit, head_size]: with two a unit, that is keys 2i and 2i + 1 of one column; an odd last one pairs with 0.
  void pack_values(const T* const* rows, int64_t n) {
    if constexpr (Math::kPerUnit == 2) {
      for (int64_t k = 0; k < n; k += 2) {
        interleave(b_.values + k / 2 * a_.head_size, rows[k], k + 1 < n ? rows[k + 1] : nullptr);
      }
    } else {
      for (int64_t k = 0; k < n; ++k) to_floats(b_.values + k * a_.head_size, rows[k], a_.head_size);
    }
  }

  void interleave(Unit* to, const T* even, const T* odd) const {
    int64_t d = 0;
    for (; odd != nullptr && d + kLanes <= a_.head_size; d += kLanes) {
      HVec low, high;
      std::memcpy(&low, even + d, sizeof(low));
      std::memcpy(&high, odd + d, sizeof(high));
      const UVec pair = __builtin_convertvector(low, UVec) | (__builtin_convertvector(high, UVec) << 16);
      std::memcpy(to + d, &pair, sizeof(pair));
    }
    for (; d < a_.head_size; ++d) {
      to[d] = even[d].bits | (odd == nullptr ? 0u : static_cast<uint32_t>(odd[d].bits) << 16);
    }
  }

  void logits(int64_t n) {
    const Vec scale = broadcast(a_.scale * (a_.softcap > 0.0f ? 1.0f / a_.softcap : kLog2e));
    product<Math>(
        {b_.keys, units(), 1, b_.query, b_.logits, columns_, units(), n}, [](const float*, int64_t) { return Vec{}; },
        [&](Vec sum) { return sum * scale; });
  }

  void softmax(int64_t key, int64_t n) {
    const ColumnState& s = b_.state;
    const bool masked = s.end[0] < key + n || s.begin[columns_ - 1] > key;
    for (int64_t c = 0; c < columns_; c += kLanes) {
      if (a_.softcap > 0.0f) cap(c, n);
      if (a_.alibi != nullptr) add_alibi(c, key, n);
      if (masked) mask(c, key, n);
      exponentials(c, n);
    }
  }

  void cap(int64_t c, int64_t n) {
    float* logit = b_.logits + c;
    for (int64_t k = 0; k < n; ++k, logit += columns_) store(logit, tanh(load(logit)) * (a_.softcap * kLog2e));
  }

  void add_alibi(int64_t c, int64_t key, int64_t n) {
    float* logit = b_.logits + c;
    const Vec slope = load(b_.state.slope + c);
    const IVec position = load_int(b_.state.position + c);
    for (int64_t k = 0; k < n; ++k, logit += columns_) {
      const IVec distance = static_cast<int32_t>(key + k) - position;
      store(logit, fma(slope, __builtin_convertvector(distance, Vec), load(logit)));
    }
  }

  void mask(int64_t c, int64_t key, int64_t n) {
    float* logit = b_.logits + c;
    const IVec begin = load_int(b_.state.begin + c), end = load_int(b_.state.end + c);
    for (int64_t k = 0; k < n; ++k, logit += columns_) {
      const IVec at = static_cast<int32_t>(key + k) - IVec{};
      store(logit, (at >= begin) & (at < end) ? load(logit) : broadcast(-INFINITY));
    }
  }

  static IVec load_int(const int32_t* p) {
    IVec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }

  // Weights 2^(logit - maximum), the sums, and the factor that corrects earlier results for the new maximum.
  void exponentials(int64_t c, int64_t n) {
    const ColumnState& s = b_.state;
    const float* logit = b_.logits + c;
    const Vec before = load(s.most + c);
    Vec most = before;
    for (int64_t k = 0; k < n; ++k) most = max(load(logit + k * columns_), most);
    const Vec correction = exp2_nonpositive(before - most);
    store(s.most + c, most);
    store(s.correction + c, correction);
    store(s.sum + c, fma(load(s.sum + c), correction, weights(c, n, most)));
  }

  // Returns the sums.
  Vec weights(int64_t c, int64_t n, Vec most) {
    const float* logit = b_.logits + c;
    Unit* to = b_.weights + c;
    Vec sum{};
    for (int64_t k = 0; k < n; k += Math::kPerUnit, to += columns_) {
      const Vec even = exp2_nonpositive(load(logit + k * columns_) - most);
      sum = sum + even;
      if constexpr (Math::kPerUnit == 1) {
        store(to, even);
      } else {
        const Vec odd = k + 1 < n ? exp2_nonpositive(load(logit + (k + 1) * columns_) - most) : Vec{};
        sum = sum + odd;
        // Two bf16 a unit, rounded to nearest; weights are neither negative nor NaN-tagged, so integers do.
        const UVec pair = ((reinterpret_cast<UVec>(even) + 0x8000u) >> 16) |
                          ((reinterpret_cast<UVec>(odd) + 0x8000u) & 0xffff0000u);
        std::memcpy(to, &pair, sizeof(pair));
      }
    }
    return sum;
  }

  // result [head_size, columns] = result · correction + values · weights.
  void add_values(int64_t n, bool first) {
    const float* correction = b_.state.correction;
    const int64_t steps = (n + Math::kPerUnit - 1) / Math::kPerUnit;
    const ProductArgs<Math> x{b_.values, 1, a_.head_size, b_.weights, b_.result, columns_, steps, a_.head_size};
    const auto keep = [](Vec sum) { return sum; };
    if (first) {
      product<Math>(x, [](const float*, int64_t) { return Vec{}; }, keep);
    } else {
      product<Math>(x, [&](const float* c, int64_t column) { return load(c) * load(correction + column); }, keep);
    }
  }

  void result_rows(float* to) { transpose(b_.result, columns_, to, a_.head_size, a_.head_size, columns_); }

  void write_out() {
    result_rows(b_.rows);
    for (int64_t c = 0; c < item_.columns; ++c) {
      const int64_t token = a_.query_start[item_.request] + row_of(c);
      T* to = static_cast<T*>(a_.out) + token * a_.out_token + head_of(c) * a_.out_head;
      const float sum = b_.state.sum[c];
      from_floats(to, b_.rows + c * a_.head_size, a_.head_size, sum == 0.0f ? 0.0f : 1.0f / sum);
    }
  }

  void write_partial(float* partial, float* stats) {
    result_rows(b_.rows);
    std::memcpy(partial, b_.rows, sizeof(float) * static_cast<size_t>(item_.columns * a_.head_size));
    for (int64_t c = 0; c < item_.columns; ++c) {
      stats[2 * c] = b_.state.most[c];
      stats[2 * c + 1] = b_.state.sum[c];
    }
  }

  const AttentionArgs& a_;
  const AttentionItem& item_;
  KeyReader reader_;
  int64_t group_, columns_;
  ColumnBuffers<Math> b_;
  BadBlock bad_;
};

}  // namespace kunlun::KUNLUN_ISA
