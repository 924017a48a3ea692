// Building blocks of the attention kernels: exponentials, transposition, conversion of rows.
#pragma once

#include <utility>

#include "core/vec.h"

// Small loops over registers: unless they are unrolled early, the registers become memory.
#define KUNLUN_UNROLL _Pragma("GCC unroll 16")

namespace kunlun::KUNLUN_ISA {

constexpr float kLog2e = 1.44269504f;

// 2^r on [-1/2, 1/2], least squares fits of the relative error: 8e-8, or 8e-5 for weights that are rounded to bf16.
template <bool kRough>
inline Vec exp2_fraction(Vec r) {
  if constexpr (kRough) {
    Vec p = broadcast(5.508873e-2f);
    p = fma(p, r, broadcast(2.4260327e-1f));
    p = fma(p, r, broadcast(6.9327626e-1f));
    return fma(p, r, broadcast(9.9992892e-1f));
  }
  Vec p = broadcast(1.32670e-3f);
  p = fma(p, r, broadcast(9.67546e-3f));
  p = fma(p, r, broadcast(5.550743e-2f));
  p = fma(p, r, broadcast(2.4022122e-1f));
  p = fma(p, r, broadcast(6.9314695e-1f));
  return fma(p, r, broadcast(1.0f));
}

// 2^x for x <= 100; 0 below -125 and for -inf.
template <bool kRough = false>
inline Vec exp2(Vec x) {
  const Vec shifted = x + 12582912.0f;  // 1.5 · 2^23: the integer part of x lands in the low bits
  const Vec p = exp2_fraction<kRough>(x - (shifted - 12582912.0f));
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<IVec>(p) + (reinterpret_cast<IVec>(shifted) << 23));
  return x >= -125.0f ? power : Vec{};
}

// tanh(x) = (1 - e) / (1 + e) with e = exp(-2|x|); a Taylor series below 0.4, where that would cancel.
inline Vec tanh(Vec x) {
  const Vec magnitude = max(x, -x);
  const Vec e = exp2(magnitude * (-2.0f * kLog2e));
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

inline bool any(IVec mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
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
  KUNLUN_UNROLL
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
      KUNLUN_UNROLL
      for (int i = 0; i < kLanes; ++i) square[i] = load(from + (r + i) * from_stride + c);
      transpose_square(square);
      KUNLUN_UNROLL
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
