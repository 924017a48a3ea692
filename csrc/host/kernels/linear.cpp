// Every output is one accumulator of kLanes partial sums over the features, reduced in a fixed order, whatever the number
// of tokens: at one instruction set, a token's result does not depend on the batch it is in.
#include "kernels/linear.h"

#include "kernels/linear_dot.h"
#include "kernels/linear_plan.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kTokenBytes = 256 * 1024;

template <typename T, typename Out>
struct Product {
  const LinearArgs& a;
  int64_t prefetch_rows;  // distance in rows from a group of rows to the one fetched meanwhile

  const T* weight(int64_t row) const { return static_cast<const T*>(a.weight) + row * a.weight_stride; }
  const T* input(int64_t token) const { return static_cast<const T*>(a.input) + token * a.input_stride; }
  Out* out(int64_t token) const { return static_cast<Out*>(a.out) + token * a.out_stride; }
  float bias(int64_t row) const {
    return a.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(a.bias)[row]);
  }

  template <int R, int Tokens, bool kPrefetch>
  void block(int64_t row, int64_t token, Vec bias, int64_t next_row) const {
    const DotOperands<T> operands{weight(row),    input(token), a.weight_stride, a.input_stride,
                                  a.features, reinterpret_cast<const char*>(weight(next_row))};
    Out results[kLanes];
    store(results, dot_block<T, R, Tokens, kPrefetch>(operands) + bias);
    for (int t = 0; t < Tokens; ++t) std::memcpy(out(token + t) + row, results + t * R, R * sizeof(Out));
  }

  template <int R>
  Vec bias_of(int64_t row) const {
    Vec v{};
    if (a.bias == nullptr) return v;
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = bias(row + lane % R);
    return v;
  }

  // All tokens of the task with R rows, `Most` tokens at a time; the rows' first pass fetches the next group.
  template <int R, int Most>
  void row_group(int64_t row, int64_t token, int64_t end, int64_t next_row) const {
    const Vec bias = bias_of<R>(row);
    if (token + Most <= end) {
      block<R, Most, true>(row, token, bias, next_row);
      token += Most;
    }
    for (; token + Most <= end; token += Most) block<R, Most, false>(row, token, bias, row);
    if constexpr (Most > 1) {
      if (token < end) row_group<R, Most / 2>(row, token, end, next_row);
    }
  }

  // A group that would reach beyond the end starts earlier and computes some rows again.
  template <int R>
  void rows(int64_t row, int64_t row_end, int64_t token, int64_t token_end) const {
    for (; row < row_end; row += R) {
      const int64_t first = std::min(row, row_end - R);
      const int64_t next = row + R < row_end ? row + R : row + R + prefetch_rows;
      row_group<R, kLanes / R>(first, token, token_end, std::min(next, a.rows - 1));
    }
  }

  void task(int64_t row, int64_t row_end, int64_t token, int64_t token_end) const {
    const int64_t n = row_end - row;
    if (token_end - token == 1 && n >= kLanes) return rows<kLanes>(row, row_end, token, token_end);
    if (token_end - token == 2 && n >= kLanes / 2) return rows<kLanes / 2>(row, row_end, token, token_end);
    if (n >= 4) return rows<4>(row, row_end, token, token_end);
    rows<1>(row, row_end, token, token_end);
  }
};

template <typename T, typename Out>
void multiply(const LinearArgs& a) {
  const LinearPlan plan = plan_linear(a, kLanes, 4, sizeof(T), kTokenBytes);
  const Product<T, Out> product{a, plan.rows * (num_threads() - 1)};
  parallel_tasks(a, plan, [&](int64_t row, int64_t row_end, int64_t token, int64_t token_end) {
    product.task(row, row_end, token, token_end);
  });
}

void linear(const LinearArgs& a) {
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
