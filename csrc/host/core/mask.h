// Comparisons of vectors as bit masks (bit i is lane i), and storing the lanes that a mask names.
#pragma once

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

constexpr uint32_t kAllLanes = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);

// Lanes where a >= b; a NaN compares false.
inline uint32_t at_least_mask(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a[i] >= b[i]) << i;
  return mask;
#endif
}

inline uint32_t equal_mask(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return mask;
#endif
}

// Lanes where a or b is NaN.
inline uint32_t unordered_mask(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a[i] != a[i] || b[i] != b[i]) << i;
  return mask;
#endif
}

// Stores the lanes in `mask` side by side and returns their number. May write up to kLanes elements.
inline int compress_store(float* out, Vec v, uint32_t mask) {
#if defined(__AVX512F__)
  // Not the storing form of the instruction, which is microcoded on Zen 4.
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v));
  return __builtin_popcount(mask);
#else
  int count = 0;
  for (; mask != 0; mask &= mask - 1) out[count++] = v[__builtin_ctz(mask)];
  return count;
#endif
}

}  // namespace kunlun::KUNLUN_ISA
