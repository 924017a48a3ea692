// Building blocks of the attention kernels: products of small tiles, transposition, exponentials.
#pragma once

#include <type_traits>
#include <utility>

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0, relative error below 2e-7 (least squares fit of 2^r on [-1/2, 1/2]); 0 below -125 and for -inf.
inline Vec exp2_nonpositive(Vec x) {
  const Vec shifted = x + 12582912.0f;  // 1.5 · 2^23: the integer part of x lands in the low bits
  const Vec r = x - (shifted - 12582912.0f);
  Vec p = broadcast(1.32670e-3f);
  p = fma(p, r, broadcast(9.67546e-3f));
  p = fma(p, r, broadcast(5.550743e-2f));
  p = fma(p, r, broadcast(2.4022122e-1f));
  p = fma(p, r, broadcast(6.9314695e-1f));
  p = fma(p, r, broadcast(1.0f));
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<IVec>(p) + (reinterpret_cast<IVec>(shifted) << 23));
  return x >= -125.0f ? power : Vec{};
}

// tanh(x) = (1 - e) / (1 + e) with e = exp(-2|x|); a Taylor series below 0.4, where that would cancel.
inline Vec tanh(Vec x) {
  const Vec magnitude = max(x, -x);
  const Vec e = exp2_nonpositive(magnitude * (-2.0f * kLog2e));
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec square = x * x;
  Vec p = broadcast(3.5921280e-3f);
  p = fma(p, square, broadcast(-8.8632355e-3f));
  p = fma(p, square, broadcast(2.1869489e-2f));
  p = fma(p, square, broadcast(-5.3968254e-2f));
  p = fma(p, square, broadcast(1.3333334e-1f));
  p = fma(p, square, broadcast(-3.3333334e-1f));
  const Vec near = fma(p * square, x, x);
  return magnitude < 0.4f ? near : (x < 0.0f ? -far : far);
}

// Products of 32-bit units: one float32, or two bf16 that are multiplied and added pairwise.
struct FloatMath {
  using Unit = float;
  static constexpr int kPerUnit = 1;
  static Vec splat(float x) { return broadcast(x); }
  static Vec load_units(const float* p) { return load(p); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct PairMath {
  using Unit = uint32_t;
  static constexpr int kPerUnit = 2;
  static __m512i splat(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static __m512i load_units(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Vec multiply_add(Vec acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// c[r][v] = finish(sum over s < steps of a[r · a_row + s · a_step] · b[s · columns + v], starting from start(r, v)).
template <typename Math>
struct ProductArgs {
  const typename Math::Unit* a;
  int64_t a_row, a_step;
  const typename Math::Unit* b;
  float* c;
  int64_t columns, steps, rows;
};

template <typename Math, int R, int V, typename Start, typename Finish>
inline void product_block(const ProductArgs<Math>& x, int64_t row, int64_t column, Start start, Finish finish) {
  Vec acc[R][V];
  float* c = x.c + row * x.columns + column;
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = start(c + r * x.columns + v * kLanes, column + v * kLanes);
  }
  const auto* a = x.a + row * x.a_row;
  const auto* b = x.b + column;
  for (int64_t s = 0; s < x.steps; ++s, a += x.a_step, b += x.columns) {
    decltype(Math::load_units(b)) right[V];
    for (int v = 0; v < V; ++v) right[v] = Math::load_units(b + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const auto left = Math::splat(a[r * x.a_row]);
      for (int v = 0; v < V; ++v) acc[r][v] = Math::multiply_add(acc[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(c + r * x.columns + v * kLanes, finish(acc[r][v]));
  }
}

// Rows in blocks of R, what is left in ever smaller ones.
template <typename Math, int R, int V, typename Start, typename Finish>
inline void product_rows(const ProductArgs<Math>& x, int64_t row, int64_t column, Start start, Finish finish) {
  for (; row + R <= x.rows; row += R) product_block<Math, R, V>(x, row, column, start, finish);
  if constexpr (R > 1) {
    if (row < x.rows) product_rows<Math, R / 2, V>(x, row, column, start, finish);
  }
}

#if defined(__AVX512F__)
constexpr int kProductVectors = 4;
constexpr int kProductRows[] = {0, 16, 8, 8, 4};  // by the number of vectors: as many accumulators as registers allow
#elif defined(__AVX2__)
constexpr int kProductVectors = 2;
constexpr int kProductRows[] = {0, 8, 4};
#else
constexpr int kProductVectors = 1;
constexpr int kProductRows[] = {0, 4};
#endif

template <typename Math, int V, typename Start, typename Finish>
inline void product_columns(const ProductArgs<Math>& x, int64_t column, Start start, Finish finish) {
  for (; column + V * kLanes <= x.columns; column += V * kLanes) {
    product_rows<Math, kProductRows[V], V>(x, 0, column, start, finish);
  }
  if constexpr (V > 1) {
    if (column < x.columns) product_columns<Math, V - 1>(x, column, start, finish);
  }
}

// `columns` must be a multiple of kLanes.
template <typename Math, typename Start, typename Finish>
inline void product(const ProductArgs<Math>& x, Start start, Finish finish) {
  product_columns<Math, kProductVectors>(x, 0, start, finish);
}

template <int S, int... I>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
  const Vec low = __builtin_shufflevector(a, b, ((I & S) == 0 ? I : I - S + kLanes)...);
  b = __builtin_shufflevector(a, b, ((I & S) == 0 ? I + S : I + kLanes)...);
  a = low;
}

// Transposes the square of kLanes vectors: swaps ever smaller off-diagonal blocks.
template <int S = kLanes / 2>
inline void transpose_square(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & S) == 0) exchange<S>(rows[i], rows[i | S], std::make_integer_sequence<int, kLanes>{});
  }
  if constexpr (S > 1) transpose_square<S / 2>(rows);
}

// to[c][r] = from[r][c] for 32-bit elements of any kind.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                      int64_t columns) {
  const int64_t whole_rows = rows - rows % kLanes, whole_columns = columns - columns % kLanes;
  for (int64_t r = 0; r < whole_rows; r += kLanes) {
    for (int64_t c = 0; c < whole_columns; c += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load(from + (r + i) * from_stride + c);
      transpose_square(square);
      for (int i = 0; i < kLanes; ++i) store(to + (c + i) * to_stride + r, square[i]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = r < whole_rows ? whole_columns : 0;
    for (int64_t c = first; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

template <typename T>
inline void to_floats(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

template <typename T>
inline void from_floats(T* to, const float* from, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * scale);
  for (; i < n; ++i) to[i] = from_float<T>(from[i] * scale);
}

}  // namespace kunlun::KUNLUN_ISA
