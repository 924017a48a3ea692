#include "kernels/sampling.h"

#include <cmath>

#include "core/mask.h"
#include "kernels/row_blocks.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kBlock = 1024;

struct MaximaScratch;
struct SumsScratch;

// Maximum of a block, or NaN if it holds one.
template <typename T>
float max_or_nan(const T* x, int64_t n) {
  Vec first = broadcast(-kInfinity), second = first;
  uint32_t nan = 0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    nan |= unordered_mask(a, b);
    first = max(a, first);
    second = max(b, second);
  }
  for (; i < n; i += kLanes) {
    const Vec a = load_partial(x + i, static_cast<int>(std::min<int64_t>(kLanes, n - i)), -kInfinity);
    nan |= unordered_mask(a, a);
    first = max(a, first);
  }
  return nan != 0 ? std::numeric_limits<float>::quiet_NaN() : reduce_max(max(first, second));
}

template <typename T>
int64_t find_first(const T* x, int64_t n, float value) {
  const bool nan = value != value;
  for (int64_t i = 0; i < n; ++i) {
    const float v = to_float(x[i]);
    if (nan ? v != v : v == value) return i;
  }
  return 0;
}

template <typename T>
int64_t argmax_row(const T* x, int64_t vocab) {
  const Blocks blocks{vocab, kBlock};
  float* maxima = scratch<MaximaScratch, float>(blocks.count());
  blocks.for_each([&](int64_t b) { maxima[b] = max_or_nan(x + blocks.begin(b), blocks.length(b)); });
  int64_t best = 0;
  for (int64_t b = 0; b < blocks.count() && maxima[best] == maxima[best]; ++b) {
    if (!(maxima[b] <= maxima[best])) best = b;  // greater, or NaN
  }
  return blocks.begin(best) + find_first(x + blocks.begin(best), blocks.length(best), maxima[best]);
}

template <typename T>
const T* row_of(const LogitsView& logits, int64_t row) {
  return static_cast<const T*>(logits.data) + row * logits.stride;
}

void argmax(int64_t* ids, const LogitsView& logits) {
  KUNLUN_DISPATCH_DTYPE(logits.dtype, T, for_rows(logits.rows, [&](int64_t row) {
                          ids[row] = argmax_row(row_of<T>(logits, row), logits.vocab);
                        }));
}

// The last element that has a share of the probability.
int64_t last_share(const float* x, int64_t n, float maximum) {
  int64_t i = n - 1;
  while (i > 0 && !(x[i] - maximum > kNegligible)) --i;
  return i;
}

// Where the cumulative sum of exp(x - maximum) first exceeds `target`, or the last share when it never does.
int64_t find_share(const float* x, int64_t n, float maximum, double target) {
  double sum = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = static_cast<int>(std::min<int64_t>(kLanes, n - i));
    const Vec share = exp_below(lanes == kLanes ? load(x + i) : load_partial(x + i, lanes, -kInfinity), maximum);
    const double all_lanes = reduce_add(share);
    if (sum + all_lanes <= target) {
      sum += all_lanes;
      continue;
    }
    for (int lane = 0; lane < lanes; ++lane) {
      sum += share[lane];
      if (sum > target && share[lane] > 0) return i + lane;
    }
  }
  return last_share(x, n, maximum);
}

// Sums of exp(x - maximum) over the blocks of a row.
struct BlockSums {
  Blocks blocks;
  double* sums;
  float maximum;
  double total;
};

BlockSums sum_blocks(const float* x, int64_t vocab) {
  const Blocks blocks{vocab, kBlock};
  float* maxima = scratch<MaximaScratch, float>(blocks.count());
  double* sums = scratch<SumsScratch, double>(blocks.count());
  blocks.for_each([&](int64_t b) {
    const float* piece = x + blocks.begin(b);
    maxima[b] = max_of(piece, blocks.length(b));
    sums[b] = maxima[b] > -kInfinity ? exp_sum(piece, blocks.length(b), maxima[b]) : 0;
  });
  const float maximum = *std::max_element(maxima, maxima + blocks.count());
  double total = 0;
  for (int64_t b = 0; b < blocks.count(); ++b) {
    const float below = maxima[b] - maximum;
    sums[b] = below > kNegligible ? sums[b] * std::exp(static_cast<double>(below)) : 0;
    total += sums[b];
  }
  return {blocks, sums, maximum, total};
}

int64_t sample_row(const float* x, int64_t vocab, double uniform) {
  const BlockSums s = sum_blocks(x, vocab);
  if (!(s.total > 0)) return argmax_row(x, vocab);  // no finite maximum
  const double target = uniform * s.total;
  double before = 0, sum = 0;
  int64_t chosen = 0;
  for (int64_t b = 0; b < s.blocks.count() && sum <= target; ++b) {
    if (s.sums[b] == 0) continue;
    chosen = b;
    before = sum;
    sum += s.sums[b];
  }
  const int64_t begin = s.blocks.begin(chosen);
  return begin + find_share(x + begin, s.blocks.length(chosen), s.maximum, target - before);
}

void sample(int64_t* ids, const LogitsView& logits, const double* uniform) {
  for_rows(logits.rows,
           [&](int64_t row) { ids[row] = sample_row(row_of<float>(logits, row), logits.vocab, uniform[row]); });
}

void min_p_row(float* x, int64_t vocab, float min_p) {
  if (!(min_p > 0)) return;
  const Blocks blocks{vocab, kBlock};
  float* maxima = scratch<MaximaScratch, float>(blocks.count());
  blocks.for_each([&](int64_t b) { maxima[b] = max_of(x + blocks.begin(b), blocks.length(b)); });
  const float maximum = *std::max_element(maxima, maxima + blocks.count());
  mask_blocks_below(x, blocks, maxima, maximum + std::min(0.0f, std::log(min_p)));
}

void min_p(const LogitsView& logits, const float* min_p) {
  for_rows(logits.rows, [&](int64_t row) {
    min_p_row(static_cast<float*>(logits.data) + row * logits.stride, logits.vocab, min_p[row]);
  });
}

void divide(float* x, int64_t n, float divisor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) / divisor);
  for (; i < n; ++i) x[i] /= divisor;
}

void temperature(const LogitsView& logits, const float* temperature) {
  const Blocks blocks{logits.vocab, kBlock};
  for_rows(logits.rows, [&](int64_t row) {
    float* x = static_cast<float*>(logits.data) + row * logits.stride;
    const float t = temperature[row];
    if (t < kGreedyTemperature || t == 1.0f) return;
    blocks.for_each([&](int64_t b) { divide(x + blocks.begin(b), blocks.length(b), t); });
  });
}

}  // namespace

const SamplingKernels sampling_kernels = {argmax, sample, min_p, temperature};

}  // namespace kunlun::KUNLUN_ISA
