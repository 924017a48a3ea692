// Splitting and merging of interleaved vectors: (x0 y0 x1 y1 …) to and from (x0 x1 …) and (y0 y1 …).
#pragma once

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

struct VecPair {
  Vec first, second;
};

// `low` and `high` hold 2 * kLanes consecutive elements; first gets those at even places, second those at odd ones.
inline VecPair deinterleave(Vec low, Vec high) {
#if defined(__AVX512F__)
  return {__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
#else
  return {__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15)};
#endif
}

// The inverse of deinterleave().
inline VecPair interleave(Vec even, Vec odd) {
#if defined(__AVX512F__)
  return {__builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
#else
  return {__builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11),
          __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15)};
#endif
}

}  // namespace kunlun::KUNLUN_ISA
