// out[t, n] = sum over k of input[t, k] * weight[n, k] + bias[n], accumulated in float32.
#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

// Strides are in elements; the elements of a row are contiguous.
struct LinearArgs {
  void* out;           // [tokens, rows]
  const void* input;   // [tokens, features]
  const void* weight;  // [rows, features]
  const void* bias;    // [rows] or nullptr
  int64_t tokens, features, rows;
  int64_t out_stride, input_stride, weight_stride;
  DType dtype;      // of input, weight and bias
  DType out_dtype;  // dtype or float32
};

struct LinearKernels {
  void (*linear)(const LinearArgs&);
};

KUNLUN_DECLARE_TABLE(LinearKernels, linear_kernels)

namespace amx {
// For bfloat16 only; needs Isa::kAmx.
void linear(const LinearArgs& args);
}  // namespace amx

}  // namespace kunlun
