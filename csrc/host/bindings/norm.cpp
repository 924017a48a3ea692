#include "kernels/norm.h"

#include "bindings/common.h"

namespace kunlun {
namespace {

DType weight_dtype_of(const at::Tensor& weight, const at::Tensor& input, const char* op) {
  const DType dtype = dtype_of(weight, op, "weight");
  TORCH_CHECK(dtype == DType::kFloat32 || weight.scalar_type() == input.scalar_type(), op, ": weight is ",
              weight.scalar_type(), "; it must be float32 or the input's type, ", input.scalar_type());
  TORCH_CHECK(weight.dim() == 1 && weight.is_contiguous() && weight.size(0) == input.size(-1), op,
              ": weight must be contiguous and of shape [", input.size(-1), "], not ", weight.sizes());
  return dtype;
}

RmsNormArgs norm_args(const char* op, const at::Tensor& out, const at::Tensor& input, const at::Tensor& weight,
                      double epsilon, double weight_offset) {
  TORCH_CHECK(out.sizes() == input.sizes() && out.scalar_type() == input.scalar_type(), op,
              ": out must have the shape and type of input");
  const Rows in = rows_of(input, op, "input");
  const Rows to = rows_of(out, op, "out");
  RmsNormArgs a{};
  a.out = out.data_ptr();
  a.input = input.data_ptr();
  a.weight = weight.data_ptr();
  a.rows = in.rows;
  a.cols = in.cols;
  a.input_stride = in.stride;
  a.out_stride = to.stride;
  a.epsilon = static_cast<float>(epsilon);
  a.weight_offset = static_cast<float>(weight_offset);
  a.dtype = dtype_of(input, op, "input");
  a.weight_dtype = weight_dtype_of(weight, input, op);
  return a;
}

void rms_norm(at::Tensor out, const at::Tensor& input, const at::Tensor& weight, double epsilon, double weight_offset) {
  norm_kernels_for(active_isa()).rms_norm(norm_args("rms_norm", out, input, weight, epsilon, weight_offset));
}

void fused_add_rms_norm(at::Tensor out, const at::Tensor& input, at::Tensor residual, const at::Tensor& weight,
                        double epsilon, double weight_offset) {
  constexpr const char* op = "fused_add_rms_norm";
  RmsNormArgs a = norm_args(op, out, input, weight, epsilon, weight_offset);
  TORCH_CHECK(residual.sizes() == input.sizes() && residual.scalar_type() == input.scalar_type(), op,
              ": residual must have the shape and type of input");
  a.residual = residual.data_ptr();
  a.residual_stride = rows_of(residual, op, "residual").stride;
  norm_kernels_for(active_isa()).rms_norm(a);
}

}  // namespace

KUNLUN_HOST_OP(rms_norm, rms_norm)
KUNLUN_HOST_OP(fused_add_rms_norm, fused_add_rms_norm)

}  // namespace kunlun
