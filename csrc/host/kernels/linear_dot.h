// Dot products of a few weight rows with a few tokens, SIMD lanes along the features: no operand is repacked.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

// What is loaded at once, how many elements that is, and how two of them are multiplied and added up.
template <typename T>
struct Dot {
  using Operand = Vec;
  static constexpr int64_t kStep = kLanes;
  static Operand load(const T* p) { return KUNLUN_ISA::load(p); }
  static Operand load_first(const T* p, int64_t n) { return load_partial(p, static_cast<int>(n)); }
  static Vec add_product(Vec sum, Operand a, Operand b) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// Two products per lane and instruction. Denormal inputs and results count as zero.
template <>
struct Dot<bf16> {
  using Operand = __m512bh;
  static constexpr int64_t kStep = 32;
  static Operand load(const bf16* p) { return reinterpret_cast<Operand>(_mm512_loadu_si512(p)); }
  static Operand load_first(const bf16* p, int64_t n) {
    return reinterpret_cast<Operand>(_mm512_maskz_loadu_epi16((1u << n) - 1u, p));
  }
  static Vec add_product(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#else
// Elements at even and odd places, so that two lanes come from each 32-bit load.
struct Bf16Pair {
  Vec even, odd;
};

inline Bf16Pair split_bf16(UVec pairs) {
  return {reinterpret_cast<Vec>(pairs << 16), reinterpret_cast<Vec>(pairs & 0xffff0000u)};
}

template <>
struct Dot<bf16> {
  using Operand = Bf16Pair;
  static constexpr int64_t kStep = 2 * kLanes;
  static Operand load(const bf16* p) {
    return split_bf16(reinterpret_cast<UVec>(KUNLUN_ISA::load(reinterpret_cast<const float*>(p))));
  }
  static Operand load_first(const bf16* p, int64_t n) {
    bf16 copy[kStep] = {};
    std::memcpy(copy, p, static_cast<size_t>(n) * sizeof(bf16));
    return load(copy);
  }
  static Vec add_product(Vec sum, Operand a, Operand b) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
};
#endif

// The sums of kLanes vectors, one per lane. Each is added up in the same order, wherever in `v` its vector is.
inline Vec reduce_each(const Vec* v) {
#if defined(__AVX512F__)
  Vec quarter[4];
  for (int i = 0; i < 4; ++i) {
    const Vec* p = v + 4 * i;
    const Vec a = __builtin_shufflevector(p[0], p[1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  __builtin_shufflevector(p[0], p[1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const Vec b = __builtin_shufflevector(p[2], p[3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  __builtin_shufflevector(p[2], p[3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    quarter[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  const Vec low =
      __builtin_shufflevector(quarter[0], quarter[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
      __builtin_shufflevector(quarter[0], quarter[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  const Vec high =
      __builtin_shufflevector(quarter[2], quarter[3], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
      __builtin_shufflevector(quarter[2], quarter[3], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#else
  Vec half[2];
  for (int i = 0; i < 2; ++i) {
    const Vec* p = v + 4 * i;
    const Vec a = __builtin_shufflevector(p[0], p[1], 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(p[0], p[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec b = __builtin_shufflevector(p[2], p[3], 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(p[2], p[3], 2, 10, 3, 11, 6, 14, 7, 15);
    half[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
              __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(half[0], half[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(half[0], half[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

template <typename T>
struct DotOperands {
  const T* weight;
  const T* input;
  int64_t weight_stride, input_stride, features;
  const char* next;  // what comes from memory afterwards: R rows of weights
};

// Adds the products of R rows and `Tokens` tokens at the features k to k + kStep; kLast: only up to the last feature.
template <int R, int Tokens, bool kLast, typename T>
inline void add_products(const DotOperands<T>& o, int64_t k, Vec* sum) {
  using D = Dot<T>;
  const auto load = [&](const T* p) { return kLast ? D::load_first(p + k, o.features - k) : D::load(p + k); };
  typename D::Operand x[Tokens];
#pragma GCC unroll 16
  for (int t = 0; t < Tokens; ++t) x[t] = load(o.input + t * o.input_stride);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const typename D::Operand w = load(o.weight + r * o.weight_stride);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) sum[t * R + r] = D::add_product(sum[t * R + r], w, x[t]);
  }
}

// Lane t * R + r of the result is the product of row r and token t. With kPrefetch, `next` is fetched meanwhile.
template <int R, int Tokens, bool kPrefetch, typename T>
inline Vec dot_block(const DotOperands<T>& o) {
  static_assert(R * Tokens <= kLanes);
  constexpr int64_t kStep = Dot<T>::kStep;
  constexpr int64_t kRowBytes = R * static_cast<int64_t>(sizeof(T));
  Vec sum[kLanes] = {};
  int64_t k = 0;
  for (; k + kStep <= o.features; k += kStep) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 16
      for (int64_t b = 0; b < kStep * kRowBytes; b += 64) __builtin_prefetch(o.next + k * kRowBytes + b, 0, 2);
    }
    add_products<R, Tokens, false>(o, k, sum);
  }
  if (k < o.features) add_products<R, Tokens, true>(o, k, sum);
  return reduce_each(sum);
}

}  // namespace kunlun::KUNLUN_ISA
