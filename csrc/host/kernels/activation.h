#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kQuickGelu };

// Rows of contiguous elements; `cols` is the width of a row of out, strides are in elements.
struct ActivationArgs {
  void* out;
  const void* input;
  int64_t rows, cols, out_stride, input_stride;
  Activation kind;     // not used by swiglu_oai
  float alpha, limit;  // used by swiglu_oai only
  DType dtype;
};

struct ActivationKernels {
  void (*activate)(const ActivationArgs&);          // out[c] = f(input[c])
  void (*activate_and_mul)(const ActivationArgs&);  // out[c] = f(input[c]) * input[cols + c]
  void (*swiglu_oai)(const ActivationArgs&);        // gate = input[2c], up = input[2c + 1]
};

KUNLUN_DECLARE_TABLE(ActivationKernels, activation_kernels)

}  // namespace kunlun
