#include "kernels/activation.h"

#include "bindings/common.h"

namespace kunlun {
namespace {

// `width` is the number of input elements that make one element of out.
ActivationArgs activation_args(const char* op, const at::Tensor& out, const at::Tensor& input, int64_t width) {
  const Rows in = rows_of(input, op, "input");
  const Rows to = rows_of(out, op, "out");
  TORCH_CHECK(out.scalar_type() == input.scalar_type(), op, ": out is ", out.scalar_type(), ", input is ",
              input.scalar_type(), "; they must have one type");
  TORCH_CHECK(in.rows == to.rows && in.cols == to.cols * width, op, ": input has the shape ", input.sizes(),
              ", so out must have as many rows of ", in.cols, " / ", width, " elements, not the shape ", out.sizes());
  ActivationArgs a{};
  a.out = out.data_ptr();
  a.input = input.data_ptr();
  a.rows = to.rows;
  a.cols = to.cols;
  a.out_stride = to.stride;
  a.input_stride = in.stride;
  a.dtype = dtype_of(input, op, "input");
  return a;
}

void silu_and_mul(at::Tensor out, const at::Tensor& input) {
  ActivationArgs a = activation_args("silu_and_mul", out, input, 2);
  a.kind = Activation::kSilu;
  activation_kernels_for(active_isa()).activate_and_mul(a);
}

void gelu_and_mul(at::Tensor out, const at::Tensor& input, bool tanh) {
  ActivationArgs a = activation_args("gelu_and_mul", out, input, 2);
  a.kind = tanh ? Activation::kGeluTanh : Activation::kGelu;
  activation_kernels_for(active_isa()).activate_and_mul(a);
}

Activation gelu_kind(c10::string_view kind) {
  if (kind == "none") return Activation::kGelu;
  if (kind == "tanh" || kind == "new" || kind == "fast") return Activation::kGeluTanh;
  TORCH_CHECK(kind == "quick", "gelu: there is no kind '", kind, "'; it must be none, tanh, new, fast or quick");
  return Activation::kQuickGelu;
}

void gelu(at::Tensor out, const at::Tensor& input, c10::string_view kind) {
  ActivationArgs a = activation_args("gelu", out, input, 1);
  a.kind = gelu_kind(kind);
  activation_kernels_for(active_isa()).activate(a);
}

void swiglu_oai(at::Tensor out, const at::Tensor& input, double alpha, double limit) {
  ActivationArgs a = activation_args("swiglu_oai", out, input, 2);
  a.alpha = static_cast<float>(alpha);
  a.limit = static_cast<float>(limit);
  activation_kernels_for(active_isa()).swiglu_oai(a);
}

}  // namespace

KUNLUN_HOST_OP(silu_and_mul, silu_and_mul)
KUNLUN_HOST_OP(gelu_and_mul, gelu_and_mul)
KUNLUN_HOST_OP(gelu, gelu)
KUNLUN_HOST_OP(swiglu_oai, swiglu_oai)

}  // namespace kunlun
