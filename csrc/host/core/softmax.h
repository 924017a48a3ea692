// Maximum and sum of exponentials of a piece of a row. NaN counts as -infinity.
#pragma once

#include <cstdint>
#include <limits>

#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// An element this far below the maximum has a probability below 2e-38, which counts as zero.
constexpr float kNegligible = -87.0f;

// exp(x - maximum), or zero where that is negligible or NaN.
inline Vec exp_below(Vec x, float maximum) {
  const Vec d = x - maximum;
  return d > kNegligible ? exp(d) : Vec{};
}

inline float max_of(const float* x, int64_t n) {
  Vec best[4];
  for (Vec& b : best) b = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) best[j] = max(load(x + i + j * kLanes), best[j]);
  }
  for (; i + kLanes <= n; i += kLanes) best[0] = max(load(x + i), best[0]);
  if (i < n) best[0] = max(load_partial(x + i, static_cast<int>(n - i), -kInfinity), best[0]);
  return reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
}

// Meant for pieces of up to a few thousand elements, longer ones lose precision.
inline float exp_sum(const float* x, int64_t n, float maximum) {
  Vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + exp_below(load(x + i + j * kLanes), maximum);
  }
  for (; i + kLanes <= n; i += kLanes) sum[0] = sum[0] + exp_below(load(x + i), maximum);
  if (i < n) sum[0] = sum[0] + exp_below(load_partial(x + i, static_cast<int>(n - i), -kInfinity), maximum);
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace kunlun::KUNLUN_ISA
