// Transposition of blocks of 32-bit values.
#pragma once

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

// Four columns of kLanes rows that are `stride` bytes apart: lane r of column[c] is element c of row r. The bits are
// moved as they are.
inline void transpose_quad(const void* rows, int64_t stride, Vec* column) {
  Vec v[4];  // v[j]: four elements of the rows j, 4 + j, 8 + j, …, one row per 128-bit lane
  for (int j = 0; j < 4; ++j) {
    const char* p = static_cast<const char*>(rows) + j * stride;
#if defined(__AVX512F__)
    __m512 quad = _mm512_castps128_ps512(_mm_loadu_ps(reinterpret_cast<const float*>(p)));
    quad = _mm512_insertf32x4(quad, _mm_loadu_ps(reinterpret_cast<const float*>(p + 4 * stride)), 1);
    quad = _mm512_insertf32x4(quad, _mm_loadu_ps(reinterpret_cast<const float*>(p + 8 * stride)), 2);
    v[j] = _mm512_insertf32x4(quad, _mm_loadu_ps(reinterpret_cast<const float*>(p + 12 * stride)), 3);
#else
    std::memcpy(reinterpret_cast<char*>(&v[j]), p, 16);
    std::memcpy(reinterpret_cast<char*>(&v[j]) + 16, p + 4 * stride, 16);
#endif
  }
#if defined(__AVX512F__)
  const Vec a = __builtin_shufflevector(v[0], v[1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  const Vec b = __builtin_shufflevector(v[0], v[1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Vec c = __builtin_shufflevector(v[2], v[3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  const Vec d = __builtin_shufflevector(v[2], v[3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  column[0] = __builtin_shufflevector(a, c, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  column[1] = __builtin_shufflevector(a, c, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  column[2] = __builtin_shufflevector(b, d, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  column[3] = __builtin_shufflevector(b, d, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#else
  const Vec a = __builtin_shufflevector(v[0], v[1], 0, 8, 1, 9, 4, 12, 5, 13);
  const Vec b = __builtin_shufflevector(v[0], v[1], 2, 10, 3, 11, 6, 14, 7, 15);
  const Vec c = __builtin_shufflevector(v[2], v[3], 0, 8, 1, 9, 4, 12, 5, 13);
  const Vec d = __builtin_shufflevector(v[2], v[3], 2, 10, 3, 11, 6, 14, 7, 15);
  column[0] = __builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13);
  column[1] = __builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
  column[2] = __builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13);
  column[3] = __builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15);
#endif
}

}  // namespace kunlun::KUNLUN_ISA
