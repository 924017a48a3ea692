#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

// Rows of `cols` contiguous elements; strides are in elements. out = x / sqrt(mean(x^2) + epsilon) * (weight + offset).
// With `residual`, x = input + residual, rounded to the element type, and x is stored to residual.
struct RmsNormArgs {
  void* out;
  const void* input;
  void* residual;  // or nullptr
  const void* weight;
  int64_t rows, cols, out_stride, input_stride, residual_stride;
  float epsilon, weight_offset;
  DType dtype, weight_dtype;
};

struct NormKernels {
  void (*rms_norm)(const RmsNormArgs&);
};

KUNLUN_DECLARE_TABLE(NormKernels, norm_kernels)

}  // namespace kunlun
