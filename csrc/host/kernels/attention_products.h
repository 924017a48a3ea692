// Products of small tiles held in registers.
#pragma once

#include "kernels/attention_math.h"

namespace kunlun::KUNLUN_ISA {

// Arithmetic on 32-bit units: one float32, or two bf16 that are multiplied and added pairwise.
struct FloatMath {
  using Unit = float;
  static Vec splat(float x) { return broadcast(x); }
  static Vec load_units(const float* p) { return load(p); }
  static Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct PairMath {
  using Unit = uint32_t;
  static __m512i splat(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static __m512i load_units(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Vec multiply_add(Vec acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// Vectors of a row of the product, and how many rows are computed at once for that many: what the registers hold.
#if defined(__AVX512F__)
constexpr int kProductVectors = 4;
constexpr int kProductRows[] = {0, 16, 8, 8, 4};
#elif defined(__AVX2__)
constexpr int kProductVectors = 2;
constexpr int kProductRows[] = {0, 8, 4};
#else
constexpr int kProductVectors = 1;
constexpr int kProductRows[] = {0, 4};
#endif
constexpr int kProductColumns = kProductVectors * kLanes;

// c[r][v] = (kAdd ? c[r][v] : 0) + sum over s < steps of a[r · a_row + s · a_step] · b[s][v], for r < rows.
// b and c have rows of kProductColumns.
template <typename Math>
struct ProductArgs {
  const typename Math::Unit* a;
  int64_t a_row, a_step;
  const typename Math::Unit* b;
  float* c;
  int64_t steps, rows;
};

template <typename Math, bool kAdd, int R, int V>
inline void product_block(const ProductArgs<Math>& x, int64_t row) {
  Vec acc[R][V] = {};
  float* c = x.c + row * kProductColumns;
  if constexpr (kAdd) {
    KUNLUN_UNROLL
    for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = load(c + i / V * kProductColumns + i % V * kLanes);
  }
  const auto* a = x.a + row * x.a_row;
  const auto* b = x.b;
  for (int64_t s = 0; s < x.steps; ++s, a += x.a_step, b += kProductColumns) {
    decltype(Math::load_units(b)) right[V];
    KUNLUN_UNROLL
    for (int v = 0; v < V; ++v) right[v] = Math::load_units(b + v * kLanes);
    KUNLUN_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto left = Math::splat(a[r * x.a_row]);
      KUNLUN_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] = Math::multiply_add(acc[r][v], left, right[v]);
    }
  }
  KUNLUN_UNROLL
  for (int i = 0; i < R * V; ++i) store(c + i / V * kProductColumns + i % V * kLanes, acc[i / V][i % V]);
}

// Rows in blocks of R, what is left in ever smaller ones.
template <typename Math, bool kAdd, int R, int V>
inline void product_rows(const ProductArgs<Math>& x, int64_t row) {
  for (; row + R <= x.rows; row += R) product_block<Math, kAdd, R, V>(x, row);
  if constexpr (R > 1) {
    if (row < x.rows) product_rows<Math, kAdd, R / 2, V>(x, row);
  }
}

// Computes the first `vectors` vectors of each row, 1 to kProductVectors.
template <typename Math, bool kAdd, int V = kProductVectors>
inline void product(const ProductArgs<Math>& x, int64_t vectors) {
  if constexpr (V > 1) {
    if (vectors < V) return product<Math, kAdd, V - 1>(x, vectors);
  }
  product_rows<Math, kAdd, kProductRows[V], V>(x, 0);
}

}  // namespace kunlun::KUNLUN_ISA
