// Top-k and top-p (nucleus) filters (Fan et al., 2018; Holtzman et al., 2020) without a sort of the vocabulary.
#include <cfloat>
#include <cmath>

#include "core/mask.h"
#include "kernels/row_blocks.h"
#include "kernels/sampling.h"
#include "kernels/weighted_select.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kBlock = 1024;

struct MaximaScratch;
struct BoundScratch;
struct SumsScratch;
struct CandidateScratch;

// A row, the maximum of each of its blocks, and room for all of its elements.
struct Row {
  float* x;
  Blocks blocks;
  float* maxima;
  float* candidates;

  Row(float* x, int64_t vocab, int64_t block_size)
      : x(x),
        blocks{vocab, block_size},
        maxima(scratch<MaximaScratch, float>(blocks.count())),
        candidates(scratch<CandidateScratch, float>(vocab + kSelectSlack)) {}

  float maximum() const { return *std::max_element(maxima, maxima + blocks.count()); }
};

int64_t append_at_least(float* out, const float* x, int64_t n, float bound) {
  const Vec least = broadcast(bound), greatest = broadcast(FLT_MAX);
  int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    const uint32_t mask = at_least_mask(v, least);
    if (mask != 0) count += compress_store(out + count, min(v, greatest), mask);
  }
  for (; i < n; ++i) {
    if (x[i] >= bound) out[count++] = std::min(x[i], FLT_MAX);
  }
  return count;
}

// Copies the elements that are at least `bound` to the candidates, infinity as the greatest finite number, and without
// those that are -infinity; returns their number.
int64_t gather(const Row& row, float bound) {
  bound = std::max(bound, -FLT_MAX);
  int64_t count = 0;
  for (int64_t b = 0; b < row.blocks.count(); ++b) {
    if (row.maxima[b] < bound) continue;
    count += append_at_least(row.candidates + count, row.x + row.blocks.begin(b), row.blocks.length(b), bound);
  }
  return count;
}

// At least k blocks have a maximum of at least the k-th greatest maximum, so the k-th greatest element is not below it.
float top_k_bound(const Row& row, int64_t k) {
  const int64_t n = row.blocks.count();
  if (n < k) return -kInfinity;
  float* maxima = scratch<BoundScratch, float>(n);
  std::copy_n(row.maxima, n, maxima);
  std::nth_element(maxima, maxima + k - 1, maxima + n, std::greater<float>());
  return maxima[k - 1];
}

// The k-th greatest element, or -infinity where fewer are greater than that.
float top_k_threshold(const Row& row, int64_t k) {
  const int64_t n = gather(row, top_k_bound(row, k));
  if (n < k) return -kInfinity;
  return WeightedSelect<CountWeight>(CountWeight{})(row.candidates, n, static_cast<double>(k)).value;
}

// At least 2k blocks, so that the bound from their maxima is close.
int64_t top_k_block_size(int64_t vocab, int64_t k) {
  const int64_t size = vocab / (2 * k) / kLanes * kLanes;
  return size == 0 ? kBlock : std::min(size, kBlock);
}

double sum_of_exp(const float* x, int64_t n, float maximum) {
  double sum = 0;
  for (int64_t i = 0; i < n; i += kBlock) sum += exp_sum(x + i, std::min(kBlock, n - i), maximum);
  return sum;
}

// Boundary of the nucleus among the elements that are at least `least`.
Boundary top_p_among(const Row& row, float least, float p) {
  const int64_t n = gather(row, least);
  if (n == 0) return {-kInfinity, 1, 1};
  const float maximum = std::min(row.maximum(), FLT_MAX);
  const double target = p * sum_of_exp(row.candidates, n, maximum);
  return WeightedSelect<ExpWeight>(ExpWeight{maximum})(row.candidates, n, target);
}

// Fills the maxima; returns the sum of exp(x - the row's maximum).
double scan_with_sum(const Row& row) {
  double* sums = scratch<SumsScratch, double>(row.blocks.count());
  row.blocks.for_each([&](int64_t b) {
    const float* x = row.x + row.blocks.begin(b);
    row.maxima[b] = max_of(x, row.blocks.length(b));
    sums[b] = row.maxima[b] > -kInfinity ? exp_sum(x, row.blocks.length(b), row.maxima[b]) : 0;
  });
  const float maximum = row.maximum();
  double total = 0;
  for (int64_t b = 0; b < row.blocks.count(); ++b) {
    if (row.maxima[b] - maximum > kNegligible)
      total += sums[b] * std::exp(static_cast<double>(row.maxima[b]) - maximum);
  }
  return total;
}

// Boundary of the nucleus of a whole row. Elements that have, all together, less than 1 - p of the probability are
// outside: those of a probability below (1 - p) / vocab each. The others are the candidates.
Boundary top_p_boundary(const Row& row, float p) {
  const double total = scan_with_sum(row);
  const float maximum = row.maximum();
  if (!(total > 0)) return {maximum, row.blocks.total, 0};  // no finite maximum
  constexpr double kRounding = 1e-3;                        // far above the error of `total`
  const double share = (1.0 - std::max(p, 0.0f)) * total / static_cast<double>(row.blocks.total);
  const int64_t n = gather(row, static_cast<float>(maximum + std::log(share) - kRounding));
  return WeightedSelect<ExpWeight>(ExpWeight{maximum})(row.candidates, n, p * total);
}

// Of the elements that equal the boundary, the last `keep` stay, as after a stable ascending sort.
void drop_ties(float* x, int64_t n, const Boundary& boundary) {
  int64_t kept = 0;
  for (int64_t i = n - 1; i >= 0; --i) {
    if (x[i] == boundary.value && ++kept > boundary.keep) x[i] = -kInfinity;
  }
}

void apply(const Row& row, const Boundary& boundary) {
  mask_blocks_below(row.x, row.blocks, row.maxima, boundary.value);
  if (boundary.keep < boundary.equal) drop_ties(row.x, row.blocks.total, boundary);
}

void filter_top_k(float* x, int64_t vocab, int64_t k, float p) {
  const Row row(x, vocab, top_k_block_size(vocab, k));
  row.blocks.for_each([&](int64_t b) { row.maxima[b] = max_of(x + row.blocks.begin(b), row.blocks.length(b)); });
  const float threshold = top_k_threshold(row, k);
  apply(row, p < 1 ? top_p_among(row, threshold, p) : Boundary{threshold, 0, 0});
}

void filter_row(float* x, int64_t vocab, int64_t k, float p) {
  if (k >= 1 && k < vocab) return filter_top_k(x, vocab, k, p);
  if (!(p < 1)) return;
  const Row row(x, vocab, kBlock);
  apply(row, top_p_boundary(row, p));
}

void top_k_top_p(const TopKTopPArgs& a) {
  for_rows(a.logits.rows, [&](int64_t i) {
    const int64_t k = a.top_k != nullptr ? a.top_k[i] : 0;
    const float p = a.top_p != nullptr ? a.top_p[i] : 1.0f;
    filter_row(static_cast<float*>(a.logits.data) + i * a.logits.stride, a.logits.vocab, k, p);
  });
}

}  // namespace

const TopKTopPKernels top_k_top_p_kernels = {top_k_top_p};

}  // namespace kunlun::KUNLUN_ISA
