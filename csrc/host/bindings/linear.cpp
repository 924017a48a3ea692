#include "kernels/linear.h"

#include "bindings/common.h"

namespace kunlun {
namespace {

void check_types(const char* op, const at::Tensor& input, const at::Tensor& weight,
                 const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), op, ": weight is ", weight.scalar_type(), ", the input ",
              input.scalar_type(), "; they must have one type");
  TORCH_CHECK(!bias || bias->scalar_type() == input.scalar_type(), op, ": bias must have the input's type");
}

void check_shapes(const char* op, const at::Tensor& out, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(input.dim() == 2 && weight.dim() == 2 && out.dim() == 2, op, ": expected matrices");
  TORCH_CHECK(input.size(1) == weight.size(1) && out.size(0) == input.size(0) && out.size(1) == weight.size(0), op,
              ": shapes do not fit: out ", out.sizes(), ", input ", input.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous()), op,
              ": bias must be contiguous and of shape [", weight.size(0), "]");
}

void multiply(const char* op, at::Tensor& out, const at::Tensor& input, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias) {
  check_shapes(op, out, input, weight, bias);
  check_types(op, input, weight, bias);
  check_rows(out, op, "out");
  check_rows(input, op, "input");
  check_rows(weight, op, "weight");
  LinearArgs a{};
  a.out = out.data_ptr();
  a.input = input.data_ptr();
  a.weight = weight.data_ptr();
  a.bias = bias ? bias->data_ptr() : nullptr;
  a.tokens = input.size(0);
  a.features = input.size(1);
  a.rows = weight.size(0);
  a.out_stride = out.stride(0);
  a.input_stride = input.stride(0);
  a.weight_stride = weight.stride(0);
  a.dtype = dtype_of(input, op, "input");
  a.out_dtype = dtype_of(out, op, "out");
  linear_kernels_for(active_isa()).linear(a);
}

void linear(at::Tensor out, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(out.scalar_type() == input.scalar_type(), "linear: out must have the input's type");
  multiply("linear", out, input, weight, bias);
}

void logits(at::Tensor out, const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(out.scalar_type() == at::kFloat, "logits: out must be float32");
  multiply("logits", out, hidden, weight, bias);
}

}  // namespace

KUNLUN_HOST_OP(linear, linear)
KUNLUN_HOST_OP(logits, logits)

}  // namespace kunlun
