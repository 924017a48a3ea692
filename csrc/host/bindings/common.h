// Checks and conversions shared by the bindings between torch and the kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#include "core/dispatch.h"

namespace kunlun {

DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument);

// Last dimension contiguous: rows may be strided.
void check_rows(const at::Tensor& tensor, const char* op, const char* argument);

// The number of rows when all but the last dimension are merged, and their common stride. Refuses a layout in which
// the rows are not evenly spaced.
struct Rows {
  int64_t rows, cols, stride;
};
Rows rows_of(const at::Tensor& tensor, const char* op, const char* argument);

// Adds a kernel to the provider's list. Binding files call it from a static initialiser through KUNLUN_HOST_OP.
using Binder = void (*)(torch::Library&);
int add_host_op(const char* name, Binder binder);

}  // namespace kunlun

// Makes `function` the host kernel of the op `name`, for bind() in bindings/registry.cpp.
#define KUNLUN_HOST_OP(name, function)     \
  static const int kunlun_host_op_##name = \
      ::kunlun::add_host_op(#name, [](torch::Library& library) { library.impl(#name, TORCH_FN(function)); });
