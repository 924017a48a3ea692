// How a tile of keys and values is laid out and multiplied, for each kind of arithmetic. All of them work on groups of
// kGroup columns (see attention_columns.h) and share one interface:
//   query_units   rows of a packed query group, [query_units][kGroup]
//   result_rows   rows of a result group, [result_rows][kGroup], at least head_size
//   kPerUnit      keys a unit of the weights holds; weights beyond the last key are 0 up to a multiple of kKeyStep
#pragma once

#include <cstring>

#include "kernels/attention_products.h"

namespace kunlun::KUNLUN_ISA {

constexpr int64_t kTileKeys = 64;

// Any type, as float32.
template <typename T>
class FloatTiles {
 public:
  using Unit = float;
  static constexpr int kPerUnit = 1, kKeyStep = 1, kGroup = kProductColumns;

  explicit FloatTiles(int64_t head_size) : head_size_(head_size) {}
  int64_t query_units() const { return head_size_; }
  int64_t result_rows() const { return head_size_; }
  int64_t key_units() const { return kTileKeys * head_size_; }
  int64_t value_units() const { return kTileKeys * head_size_; }

  void query_row(float* to, const T* from) const { to_floats(to, from, head_size_); }

  void pack_keys(float* to, const T* const* rows, int64_t n) const {
    for (int64_t k = 0; k < n; ++k) to_floats(to + k * head_size_, rows[k], head_size_);
  }

  void pack_values(float* to, const T* const* rows, int64_t n) const { pack_keys(to, rows, n); }

  void logits(const float* keys, const float* query, float* to, int64_t n, int64_t vectors) const {
    product<FloatMath, false>({keys, head_size_, 1, query, to, head_size_, n}, vectors);
  }

  void add_values(const float* values, const float* weights, float* to, int64_t n, int64_t vectors) const {
    product<FloatMath, true>({values, 1, head_size_, weights, to, n, head_size_}, vectors);
  }

 private:
  int64_t head_size_;
};

#if defined(__AVX512BF16__)
// bf16 with an even head size, multiplied in pairs.
class PairTiles {
 public:
  using Unit = uint32_t;
  static constexpr int kPerUnit = 2, kKeyStep = 2, kGroup = kProductColumns;

  explicit PairTiles(int64_t head_size) : head_size_(head_size) {}
  int64_t query_units() const { return head_size_ / 2; }
  int64_t result_rows() const { return head_size_; }
  int64_t key_units() const { return kTileKeys * head_size_ / 2; }
  int64_t value_units() const { return kTileKeys * head_size_ / 2; }

  void query_row(uint32_t* to, const bf16* from) const {
    std::memcpy(to, from, static_cast<size_t>(head_size_) * sizeof(bf16));
  }

  void pack_keys(uint32_t* to, const bf16* const* rows, int64_t n) const {
    for (int64_t k = 0; k < n; ++k) query_row(to + k * head_size_ / 2, rows[k]);
  }

  // [keys / 2][head_size], each unit keys 2i and 2i + 1; an odd last key pairs with 0.
  void pack_values(uint32_t* to, const bf16* const* rows, int64_t n) const {
    for (int64_t k = 0; k < n; k += 2, to += head_size_) interleave(to, rows[k], k + 1 < n ? rows[k + 1] : nullptr);
  }

  void logits(const uint32_t* keys, const uint32_t* query, float* to, int64_t n, int64_t vectors) const {
    product<PairMath, false>({keys, head_size_ / 2, 1, query, to, head_size_ / 2, n}, vectors);
  }

  void add_values(const uint32_t* values, const uint32_t* weights, float* to, int64_t n, int64_t vectors) const {
    product<PairMath, true>({values, 1, head_size_, weights, to, (n + 1) / 2, head_size_}, vectors);
  }

 private:
  void interleave(uint32_t* to, const bf16* even, const bf16* odd) const {
    int64_t d = 0;
    for (; odd != nullptr && d + kLanes <= head_size_; d += kLanes) {
      HVec low, high;
      std::memcpy(&low, even + d, sizeof(low));
      std::memcpy(&high, odd + d, sizeof(high));
      const UVec pair = __builtin_convertvector(low, UVec) | (__builtin_convertvector(high, UVec) << 16);
      std::memcpy(to + d, &pair, sizeof(pair));
    }
    for (; d < head_size_; ++d) {
      to[d] = even[d].bits | (odd == nullptr ? 0u : static_cast<uint32_t>(odd[d].bits) << 16);
    }
  }

  int64_t head_size_;
};
#endif

}  // namespace kunlun::KUNLUN_ISA
