// Without transposition every output is one accumulator of partial sums over the features, lane by lane, reduced in a
// fixed order whatever the number of tokens: a token's result does not depend on the batch it is in.
#include "kernels/linear.h"

#include <type_traits>

#include "kernels/linear_dot.h"
#include "kernels/linear_panel.h"
#include "kernels/linear_plan.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kDotTokenBytes = 256 * 1024;
constexpr int64_t kPanelTokenBytes = 2 << 20;

// Whether there are so many tokens that transposing the weights costs less than it saves (measured). It never does
// where an instruction multiplies bf16 itself, nor without FMA. Where it does, the order of a sum, and so its last
// bits, depend on the number of tokens.
template <typename T>
bool transposing_pays(const LinearArgs& a) {
#if defined(__AVX512BF16__)
  constexpr int64_t kMany = std::is_same_v<T, fp16> ? 48 : 96;
  return a.tokens >= kMany && !std::is_same_v<T, bf16>;
#elif defined(__AVX2__)
  return a.tokens >= 96;
#else
  (void)a;
  return false;
#endif
}

template <typename T, typename Out>
class DotTask {
 public:
  explicit DotTask(const LinearArgs& args) : a_(args) {}

  // Few tokens need more rows at once to keep the arithmetic units busy.
  void operator()(const LinearRange& range) const {
    const int64_t rows = range.row_end - range.row;
    const int64_t tokens = range.token_end - range.token;
    if (tokens == 1 && rows >= kLanes) return all_rows<kLanes>(range);
    if (tokens == 2 && rows >= kLanes / 2) return all_rows<kLanes / 2>(range);
    if (rows >= 4) return all_rows<4>(range);
    all_rows<1>(range);
  }

 private:
  const T* weight(int64_t row) const { return static_cast<const T*>(a_.weight) + row * a_.weight_stride; }
  const T* input(int64_t token) const { return static_cast<const T*>(a_.input) + token * a_.input_stride; }
  Out* out(int64_t token) const { return static_cast<Out*>(a_.out) + token * a_.out_stride; }

  // A group of R rows that would reach beyond the end starts earlier and computes some rows again.
  template <int R>
  void all_rows(const LinearRange& range) const {
    for (int64_t row = range.row; row < range.row_end; row += R) {
      row_group<R, std::min(kLanes / R, 4), true>(std::min(row, range.row_end - R), range, range.token,
                                                  std::min(row + R, a_.rows - 1));
    }
  }

  // R rows with the tokens from `token` on, `Most` at a time; the first pass fetches the next rows.
  template <int R, int Most, bool kPrefetch>
  void row_group(int64_t row, const LinearRange& range, int64_t token, int64_t next_row) const {
    const Vec bias = bias_of<R>(row);
    if (kPrefetch && token + Most <= range.token_end) {
      block<R, Most, true>(row, token, bias, next_row);
      token += Most;
    }
    for (; token + Most <= range.token_end; token += Most) block<R, Most, false>(row, token, bias, next_row);
    if constexpr (Most > 1) {
      if (token < range.token_end) row_group<R, Most / 2, false>(row, range, token, next_row);
    }
  }

  template <int R, int Tokens, bool kPrefetch>
  void block(int64_t row, int64_t token, Vec bias, int64_t next_row) const {
    const DotOperands<T> operands{weight(row),     input(token), a_.weight_stride,
                                  a_.input_stride, a_.features,  reinterpret_cast<const char*>(weight(next_row))};
    Out results[kLanes];
    store(results, dot_block<R, Tokens, kPrefetch>(operands) + bias);
    for (int t = 0; t < Tokens; ++t) std::memcpy(out(token + t) + row, results + t * R, R * sizeof(Out));
  }

  template <int R>
  Vec bias_of(int64_t row) const {
    Vec v{};
    if (a_.bias == nullptr) return v;
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = to_float(static_cast<const T*>(a_.bias)[row + lane % R]);
    return v;
  }

  const LinearArgs& a_;
};

template <typename T, typename Out>
void multiply(const LinearArgs& a) {
  if (transposing_pays<T>(a)) {
    const PanelTask<T, Out> task(a);
    parallel_tasks(a, plan_linear(a, {kPanelRows, kPanelTokens, sizeof(float), kPanelTokenBytes}), task);
    return;
  }
  const LinearPlan plan = plan_linear(a, {kLanes, 4, sizeof(T), kDotTokenBytes});
  parallel_tasks(a, plan, DotTask<T, Out>(a));
}

void linear(const LinearArgs& a) {
  if (a.tokens == 0 || a.rows == 0) return;
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, {
    if (a.out_dtype == a.dtype) {
      multiply<T, T>(a);
    } else {
      multiply<T, float>(a);
    }
  });
}

}  // namespace

const LinearKernels linear_kernels = {linear};

}  // namespace kunlun::KUNLUN_ISA
