// Selection of a threshold without sorting: the value at which the elements, taken from the greatest down, reach a
// given weight. Histograms over the range of values, each narrowed to the bin in which the weight is reached.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/softmax.h"

namespace kunlun::KUNLUN_ISA {

// Elements above `value`, and the first `keep` of the `equal` elements that equal it, have the weight.
struct Boundary {
  float value;
  int64_t keep, equal;
};

// Every element weighs 1: the boundary is the n-th greatest.
struct CountWeight {
  void operator()(const float*, int64_t n, float* weights) const { std::fill_n(weights, n, 1.0f); }
};

// exp(x - maximum), the unnormalised probability.
struct ExpWeight {
  float maximum;

  // Reads and writes whole vectors.
  void operator()(const float* x, int64_t n, float* weights) const {
    for (int64_t i = 0; i < n; i += kLanes) store(weights + i, exp_below(load(x + i), maximum));
  }
};

constexpr int64_t kSelectSlack = kLanes;  // elements that must be readable behind the n values

template <typename Weight>
class WeightedSelect {
 public:
  explicit WeightedSelect(const Weight& weight) : weight_(weight) {}

  // `values`: n >= 1 finite elements, which are reordered and overwritten. When all of them together do not reach
  // `target`, the boundary is the least of them.
  Boundary operator()(float* values, int64_t n, double target) const {
    double above = 0;
    while (n > kSorted) {
      const Range range = range_of(values, n);
      if (range.low == range.high) return all_equal(values, n, target - above);
      const Bins bins(range);
      n = keep_bin(values, n, bins, find_bin(values, n, target, bins, &above));
    }
    return walk(values, n, target - above);
  }

 private:
  static constexpr int64_t kSorted = 128;  // few enough to sort
  static constexpr int64_t kChunk = 256;
  static constexpr int kBins = 512;

  struct Range {
    float low, high;
  };

  // Bin 0 holds the greatest values. In double, so that neither the range nor its inverse overflows. The greatest and
  // the least value are never in one bin.
  struct Bins {
    explicit Bins(const Range& r) : high(r.high), scale(kBins / (static_cast<double>(r.high) - r.low)) {}

    void operator()(const float* values, int64_t n, int* index) const {
      for (int64_t i = 0; i < n; ++i) index[i] = std::min(static_cast<int>((high - values[i]) * scale), kBins - 1);
    }

    double high, scale;
  };

  static Range range_of(const float* values, int64_t n) {
    Vec low = broadcast(values[0]), high = low;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      low = min(low, load(values + i));
      high = max(high, load(values + i));
    }
    const Vec rest = load_partial(values + i, static_cast<int>(n - i), values[0]);
    return {-reduce_max(-min(low, rest)), reduce_max(max(high, rest))};
  }

  // The bin in which the weight is reached; adds to `above` what the bins before it weigh.
  int find_bin(const float* values, int64_t n, double target, const Bins& bins, double* above) const {
    double sums[2 * kBins] = {};
    for (int64_t i = 0; i < n; i += kChunk) add_chunk(values + i, std::min(kChunk, n - i), bins, sums);
    int chosen = 0;
    double sum = *above;
    for (int b = 0; b < kBins && sum < target; ++b) {
      const double weight = sums[b] + sums[kBins + b];
      if (weight == 0) continue;
      chosen = b;
      *above = sum;
      sum += weight;
    }
    return chosen;
  }

  // Two sets of sums, so that neighbours in one bin do not wait for each other.
  void add_chunk(const float* values, int64_t n, const Bins& bins, double* sums) const {
    float weights[kChunk + kSelectSlack];
    int index[kChunk];
    weight_(values, n, weights);
    bins(values, n, index);
    for (int64_t i = 0; i < n; ++i) sums[(i & 1) * kBins + index[i]] += weights[i];
  }

  // Moves the values of one bin to the front; returns their number.
  static int64_t keep_bin(float* values, int64_t n, const Bins& bins, int chosen) {
    int index[kChunk];
    int64_t kept = 0;
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      const int64_t size = std::min(kChunk, n - begin);
      bins(values + begin, size, index);
      for (int64_t i = 0; i < size; ++i) {
        values[kept] = values[begin + i];
        kept += index[i] == chosen;
      }
    }
    return kept;
  }

  Boundary all_equal(const float* values, int64_t n, double target) const {
    float weights[kLanes];
    weight_(values, 1, weights);
    const double wanted = weights[0] > 0 ? std::ceil(target / weights[0]) : static_cast<double>(n);
    return {values[0], static_cast<int64_t>(std::clamp(wanted, 1.0, static_cast<double>(n))), n};
  }

  Boundary walk(float* values, int64_t n, double target) const {
    float weights[kSorted + kSelectSlack];
    std::sort(values, values + n, std::greater<float>());
    weight_(values, n, weights);
    int64_t i = 0;
    for (double sum = weights[0]; sum < target && i + 1 < n; sum += weights[i]) ++i;
    const auto run = std::equal_range(values, values + n, values[i], std::greater<float>());
    return {values[i], values + i + 1 - run.first, run.second - run.first};
  }

  Weight weight_;
};

}  // namespace kunlun::KUNLUN_ISA
