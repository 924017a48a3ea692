// Arithmetic of attention for a few query rows: the vector lanes run along the head, rows of keys and values are read
// where they lie.
#pragma once

#include <cstring>

#include "kernels/attention_math.h"

namespace kunlun::KUNLUN_ISA {

// Lane i of the result is the sum of the lanes of sums[i].
template <int S = kLanes / 2>
inline Vec sum_each(Vec (&sums)[kLanes]) {
  KUNLUN_UNROLL
  for (int i = 0; i < S; ++i) {
    exchange<S>(sums[i], sums[i + S], std::make_integer_sequence<int, kLanes>{});
    sums[i] = sums[i] + sums[i + S];
  }
  if constexpr (S > 1) return sum_each<S / 2>(sums);
  return sums[0];
}

// The first `left` elements of a row, zero beyond; all of them if left >= kLanes.
template <typename T>
inline Vec load_row(const T* p, int64_t left) {
  if (left >= kLanes) return load(p);
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>(left <= 0 ? 0 : (1 << left) - 1);
  if constexpr (sizeof(T) == 4) {
    return _mm512_maskz_loadu_ps(mask, p);
  } else {
    T part[kLanes];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(part), _mm256_maskz_loadu_epi16(mask, p));
    return load(part);
  }
#else
  return load_partial(p, static_cast<int>(left));
#endif
}

constexpr int64_t kSpanKeys = 256;  // keys whose logits are computed before their values are read

template <typename Dots, int R, typename T, typename Weight>
inline void accumulate_rows(float* result, int64_t stride, const Weight* weights, const T* const* values, int64_t keys,
                            int64_t size) {
  constexpr int64_t kWide = Dots::kChunk * Dots::kStep;
  int64_t d = 0;
  for (; d + kWide <= stride; d += kWide) {
    Dots::template accumulate_part<R, Dots::kChunk>(result, stride, weights, values, keys, d, size);
  }
  for (; d < stride; d += Dots::kStep) {
    Dots::template accumulate_part<R, 1>(result, stride, weights, values, keys, d, size);
  }
}

// Up to four rows share one pass over the values.
template <typename Dots, typename T, typename Weight>
inline void accumulate_all(float* result, int64_t stride, const Weight* weights, int64_t rows, const T* const* values,
                           int64_t keys, int64_t size) {
  for (; rows >= 4; rows -= 4, result += 4 * stride, weights += 4 * kSpanKeys) {
    accumulate_rows<Dots, 4>(result, stride, weights, values, keys, size);
  }
  if (rows == 3) accumulate_rows<Dots, 3>(result, stride, weights, values, keys, size);
  if (rows == 2) accumulate_rows<Dots, 2>(result, stride, weights, values, keys, size);
  if (rows == 1) accumulate_rows<Dots, 1>(result, stride, weights, values, keys, size);
}

// Any type, multiplied as float32. The interface, shared by all kinds of arithmetic:
//   kKeyStep      keys are worked on in multiples of this; row pointers are repeated, weights zero beyond the last key
//   stride        elements of a row of the result
//   query_size    elements of the packed query
//   logits        to[r · kSpanKeys + k] = query r · keys[k], for kKeyStep keys
//   accumulate    result[r] += sum over keys of weights[r · kSpanKeys + k] · values[k]
//   restore_order puts a finished row of the result in the order of the head
template <typename T>
class FloatDots {
 public:
  using Query = float;
  using Weight = float;
  static constexpr int kKeyStep = kLanes;

  FloatDots(int64_t size, int64_t rows) : size_(size), rows_(rows), stride_((size + kLanes - 1) / kLanes * kLanes) {}
  int64_t stride() const { return stride_; }
  int64_t query_size() const { return rows_ * stride_; }

  void pack_query(float* to, int64_t r, const T* from) const { to_floats(to + r * stride_, from, size_); }

  void logits(const float* query, const T* const* keys, float* to) const {
    for (int64_t r = 0; r < rows_; ++r) store(to + r * kSpanKeys, dots(query + r * stride_, keys, size_));
  }

  void accumulate(float* result, const float* weights, const T* const* values, int64_t n) const {
    accumulate_all<FloatDots>(result, stride_, weights, rows_, values, n, size_);
  }

  void restore_order(float*) const {}

  static constexpr int kStep = kLanes;
  static constexpr int kChunk = kLanes == 16 ? 4 : 2;

  // Elements [d, d + V · kStep) of R rows.
  template <int R, int V>
  static void accumulate_part(float* result, int64_t stride, const float* weights, const T* const* rows, int64_t keys,
                              int64_t d, int64_t size) {
    Vec acc[R][V];
    KUNLUN_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = load(result + i / V * stride + d + i % V * kLanes);
    const bool whole = d + V * kLanes <= size;
    for (int64_t k = 0; k < keys; ++k) {
      Vec value[V];
      KUNLUN_UNROLL
      for (int v = 0; v < V; ++v) {
        const int64_t at = d + v * kLanes;
        value[v] = whole ? load(rows[k] + at) : load_row(rows[k] + at, size - at);
      }
      KUNLUN_UNROLL
      for (int i = 0; i < R * V; ++i) {
        acc[i / V][i % V] = fma(broadcast(weights[i / V * kSpanKeys + k]), value[i % V], acc[i / V][i % V]);
      }
    }
    KUNLUN_UNROLL
    for (int i = 0; i < R * V; ++i) store(result + i / V * stride + d + i % V * kLanes, acc[i / V][i % V]);
  }

 private:
  static Vec dots(const float* query, const T* const* rows, int64_t size) {
    Vec sums[kLanes] = {};
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) {
      const Vec q = load(query + d);
      KUNLUN_UNROLL
      for (int i = 0; i < kLanes; ++i) sums[i] = fma(load(rows[i] + d), q, sums[i]);
    }
    if (d < size) {
      const Vec q = load(query + d);
      for (int i = 0; i < kLanes; ++i) sums[i] = fma(load_row(rows[i] + d, size - d), q, sums[i]);
    }
    return sum_each(sums);
  }

  int64_t size_, rows_, stride_;
};

#if defined(__AVX512BF16__)
// bf16, multiplied in pairs. A step's 32 results come as two vectors that unpacking leaves interleaved.
class PairDots {
 public:
  using Query = bf16;
  using Weight = bf16;
  static constexpr int kKeyStep = kLanes;

  PairDots(int64_t size, int64_t rows) : size_(size), rows_(rows), stride_((size + kStep - 1) / kStep * kStep) {}
  int64_t stride() const { return stride_; }
  int64_t query_size() const { return rows_ * stride_; }

  void pack_query(bf16* to, int64_t r, const bf16* from) const {
    std::memcpy(to + r * stride_, from, static_cast<size_t>(size_) * sizeof(bf16));
  }

  void logits(const bf16* query, const bf16* const* keys, float* to) const {
    for (int64_t r = 0; r < rows_; ++r) store(to + r * kSpanKeys, dots(query + r * stride_, keys, size_));
  }

  void accumulate(float* result, const bf16* weights, const bf16* const* values, int64_t n) const {
    accumulate_all<PairDots>(result, stride_, weights, rows_, values, n, size_);
  }

  void restore_order(float* row) const {
    for (int64_t d = 0; d < stride_; d += kStep) restore_step(row + d);
  }

  // From the order of unpacking (within 128 bits: elements 0-3 in the first vector, 4-7 in the second) to the head's.
  static void restore_step(float* row) {
    const Vec low = load(row), high = load(row + kLanes);
    store(row, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(row + kLanes,
          __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }

  // Up to 32 elements, zero beyond `left`.
  static __m512i load_part(const bf16* p, int64_t left) {
    if (left >= kStep) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(left <= 0 ? 0u : (1u << left) - 1, p);
  }

  static constexpr int kStep = 32;
  static constexpr int kChunk = 2;

  // Elements [d, d + V · kStep) of R rows.
  template <int R, int V>
  static void accumulate_part(float* result, int64_t stride, const bf16* weights, const bf16* const* rows, int64_t keys,
                              int64_t d, int64_t size) {
    Vec acc[R][2 * V];
    KUNLUN_UNROLL
    for (int i = 0; i < 2 * R * V; ++i) acc[i / (2 * V)][i % (2 * V)] = load(result_at<V>(result, stride, d, i));
    for (int64_t k = 0; k < keys; k += 2) {
      __m512i pairs[2 * V];
      KUNLUN_UNROLL
      for (int v = 0; v < V; ++v) {
        const int64_t at = d + v * kStep;
        const __m512i even = load_part(rows[k] + at, size - at), odd = load_part(rows[k + 1] + at, size - at);
        pairs[2 * v] = _mm512_unpacklo_epi16(even, odd);
        pairs[2 * v + 1] = _mm512_unpackhi_epi16(even, odd);
      }
      KUNLUN_UNROLL
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, weights + r * kSpanKeys + k, sizeof(both));
        const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
        KUNLUN_UNROLL
        for (int v = 0; v < 2 * V; ++v) {
          acc[r][v] = _mm512_dpbf16_ps(acc[r][v], weight, reinterpret_cast<__m512bh>(pairs[v]));
        }
      }
    }
    KUNLUN_UNROLL
    for (int i = 0; i < 2 * R * V; ++i) store(result_at<V>(result, stride, d, i), acc[i / (2 * V)][i % (2 * V)]);
  }

 private:
  static __m512bh load_pairs(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

  static Vec dots(const bf16* query, const bf16* const* rows, int64_t size) {
    Vec sums[kLanes] = {};
    int64_t d = 0;
    for (; d + kStep <= size; d += kStep) {
      const __m512bh q = load_pairs(query + d);
      KUNLUN_UNROLL
      for (int i = 0; i < kLanes; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], q, load_pairs(rows[i] + d));
    }
    if (d < size) {
      const __m512bh q = load_pairs(query + d);
      KUNLUN_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        sums[i] = _mm512_dpbf16_ps(sums[i], q, reinterpret_cast<__m512bh>(load_part(rows[i] + d, size - d)));
      }
    }
    return sum_each(sums);
  }

  template <int V>
  static float* result_at(float* result, int64_t stride, int64_t d, int i) {
    return result + i / (2 * V) * stride + d + i % (2 * V) * kLanes;
  }

  int64_t size_, rows_, stride_;
};
#endif

}  // namespace kunlun::KUNLUN_ISA
