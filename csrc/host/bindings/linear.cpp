#include "kernels/linear.h"

#include "bindings/common.h"

namespace kunlun {
namespace {

void check_types(const char* op, const char* input_name, const at::Tensor& input, const at::Tensor& weight,
                 const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), op, ": weight is ", weight.scalar_type(), " and ",
              input_name, " ", input.scalar_type(), "; they must have one type");
  TORCH_CHECK(!bias || bias->scalar_type() == input.scalar_type(), op, ": bias is ", bias->scalar_type(), " and ",
              input_name, " ", input.scalar_type(), "; they must have one type");
}

void check_shapes(const char* op, const char* input_name, const at::Tensor& out, const at::Tensor& input,
                  const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(input.dim() == 2 && weight.dim() == 2 && out.dim() == 2, op, ": out, ", input_name,
              " and weight must have two dimensions, not ", out.dim(), ", ", input.dim(), " and ", weight.dim());
  TORCH_CHECK(input.size(1) == weight.size(1) && out.size(0) == input.size(0) && out.size(1) == weight.size(0), op,
              ": out ", out.sizes(), " does not fit ", input_name, " ", input.sizes(), " and weight ", weight.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous()), op,
              ": bias must be contiguous and of shape [", weight.size(0), "], not ", bias->sizes());
}

void multiply(const char* op, const char* input_name, at::Tensor& out, const at::Tensor& input,
              const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_shapes(op, input_name, out, input, weight, bias);
  check_types(op, input_name, input, weight, bias);
  check_rows(out, op, "out");
  check_rows(input, op, input_name);
  check_rows(weight, op, "weight");
  LinearArgs a{};
  a.out = out.data_ptr();
  a.input = input.const_data_ptr();
  a.weight = weight.const_data_ptr();
  a.bias = bias ? bias->const_data_ptr() : nullptr;
  a.tokens = input.size(0);
  a.features = input.size(1);
  a.rows = weight.size(0);
  a.out_stride = out.stride(0);
  a.input_stride = input.stride(0);
  a.weight_stride = weight.stride(0);
  a.dtype = dtype_of(input, op, input_name);
  a.out_dtype = dtype_of(out, op, "out");
  const Isa isa = active_isa();
  if (isa == Isa::kAmx && a.dtype == DType::kBFloat16) return amx::linear(a);
  linear_kernels_for(isa).linear(a);
}

void linear(at::Tensor out, const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(out.scalar_type() == input.scalar_type(), "linear: out is ", out.scalar_type(), " and input ",
              input.scalar_type(), "; they must have one type");
  multiply("linear", "input", out, input, weight, bias);
}

void logits(at::Tensor out, const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(out.scalar_type() == at::kFloat, "logits: out must be float32, not ", out.scalar_type());
  multiply("logits", "hidden", out, hidden, weight, bias);
}

}  // namespace

KUNLUN_HOST_OP(linear, linear)
KUNLUN_HOST_OP(logits, logits)

}  // namespace kunlun
