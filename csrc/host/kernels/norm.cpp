#include "kernels/norm.h"

#include <cmath>

#include "core/thread_pool.h"
#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kElementsPerTask = 4096;

// Stores input + residual to residual; returns the sum of squares of what was stored.
template <typename T>
float add_residual(T* residual, const T* input, int64_t cols) {
  Vec sum{};
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) {
    store(residual + c, load(input + c) + load(residual + c));
    const Vec x = load(residual + c);
    sum = fma(x, x, sum);
  }
  float total = reduce_add(sum);
  for (; c < cols; ++c) {
    residual[c] = from_float<T>(to_float(input[c]) + to_float(residual[c]));
    total += to_float(residual[c]) * to_float(residual[c]);
  }
  return total;
}

template <typename T>
float sum_of_squares(const T* x, int64_t cols) {
  Vec sum{};
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) {
    const Vec v = load(x + c);
    sum = fma(v, v, sum);
  }
  float total = reduce_add(sum);
  for (; c < cols; ++c) total += to_float(x[c]) * to_float(x[c]);
  return total;
}

template <typename T, typename W>
void scale_row(T* out, const T* x, const W* weight, int64_t cols, float scale, float offset) {
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) store(out + c, load(x + c) * scale * (load(weight + c) + offset));
  for (; c < cols; ++c) out[c] = from_float<T>(to_float(x[c]) * scale * (to_float(weight[c]) + offset));
}

template <typename T, typename W>
void rms_norm_row(const RmsNormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.input) + row * a.input_stride;
  T* residual = static_cast<T*>(a.residual);
  float squares;
  if (residual != nullptr) {
    residual += row * a.residual_stride;
    squares = add_residual(residual, x, a.cols);
    x = residual;
  } else {
    squares = sum_of_squares(x, a.cols);
  }
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(a.cols) + a.epsilon);
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  scale_row(out, x, static_cast<const W*>(a.weight), a.cols, scale, a.weight_offset);
}

template <typename T, typename W>
void rms_norm_rows(const RmsNormArgs& a) {
  const int64_t grain = kElementsPerTask / (a.cols + 1) + 1;
  parallel_ranges(a.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row<T, W>(a, row);
  });
}

void rms_norm(const RmsNormArgs& a) {
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, {
    if (a.weight_dtype == a.dtype) {
      rms_norm_rows<T, T>(a);
    } else {
      rms_norm_rows<T, float>(a);
    }
  });
}

}  // namespace

const NormKernels norm_kernels = {rms_norm};

}  // namespace kunlun::KUNLUN_ISA
