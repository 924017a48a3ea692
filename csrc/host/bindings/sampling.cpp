#include "kernels/sampling.h"

#include <optional>
#include <vector>

#include "bindings/common.h"

namespace kunlun {
namespace {

LogitsView logits_view(const at::Tensor& logits, const char* op) {
  check_rows(logits, op, "logits");
  TORCH_CHECK(logits.dim() == 2 && (logits.size(1) > 0 || logits.size(0) == 0), op,
              ": logits must be [rows, vocabulary], not ", logits.sizes());
  return {logits.data_ptr(), logits.size(0), logits.size(1), logits.stride(0), dtype_of(logits, op, "logits")};
}

LogitsView float_logits_view(const at::Tensor& logits, const char* op) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat, op, ": logits must be float32, not ", logits.scalar_type());
  return logits_view(logits, op);
}

// One value per row of logits.
template <typename T>
T* per_row(const at::Tensor& tensor, const LogitsView& logits, const char* op, const char* name) {
  constexpr at::ScalarType wanted = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK(
      tensor.scalar_type() == wanted && tensor.dim() == 1 && tensor.size(0) == logits.rows && tensor.is_contiguous(),
      op, ": ", name, " must be contiguous ", wanted, " of shape [", logits.rows, "], not ", tensor.scalar_type(), " ",
      tensor.sizes());
  return tensor.data_ptr<T>();
}

void argmax(at::Tensor ids, const at::Tensor& logits) {
  const LogitsView view = logits_view(logits, "argmax");
  sampling_kernels_for(active_isa()).argmax(per_row<int64_t>(ids, view, "argmax", "ids"), view);
}

void sample(at::Tensor ids, const at::Tensor& logits, const at::Tensor& uniform) {
  const LogitsView view = float_logits_view(logits, "sample");
  const double* u = per_row<double>(uniform, view, "sample", "uniform");
  for (int64_t i = 0; i < view.rows; ++i) {
    TORCH_CHECK(u[i] >= 0 && u[i] < 1, "sample: uniform[", i, "] = ", u[i], " is outside [0, 1)");
  }
  sampling_kernels_for(active_isa()).sample(per_row<int64_t>(ids, view, "sample", "ids"), view, u);
}

void min_p(at::Tensor logits, const at::Tensor& min_p) {
  const LogitsView view = float_logits_view(logits, "min_p");
  sampling_kernels_for(active_isa()).min_p(view, per_row<float>(min_p, view, "min_p", "min_p"));
}

void temperature(at::Tensor logits, const at::Tensor& temperature) {
  const LogitsView view = float_logits_view(logits, "temperature");
  const float* t = per_row<float>(temperature, view, "temperature", "temperature");
  sampling_kernels_for(active_isa()).temperature(view, t);
}

void top_k_top_p(at::Tensor logits, const std::optional<at::Tensor>& top_k, const std::optional<at::Tensor>& top_p) {
  constexpr const char* op = "top_k_top_p";
  TopKTopPArgs a{};
  a.logits = float_logits_view(logits, op);
  std::vector<int64_t> widened;
  if (top_k.has_value() && top_k->scalar_type() == at::kInt) {
    const int32_t* k = per_row<int32_t>(*top_k, a.logits, op, "top_k");
    widened.assign(k, k + a.logits.rows);
    a.top_k = widened.data();
  } else if (top_k.has_value()) {
    a.top_k = per_row<int64_t>(*top_k, a.logits, op, "top_k");
  }
  if (top_p.has_value()) a.top_p = per_row<float>(*top_p, a.logits, op, "top_p");
  top_k_top_p_kernels_for(active_isa()).top_k_top_p(a);
}

}  // namespace

KUNLUN_HOST_OP(argmax, argmax)
KUNLUN_HOST_OP(sample, sample)
KUNLUN_HOST_OP(min_p, min_p)
KUNLUN_HOST_OP(temperature, temperature)
KUNLUN_HOST_OP(top_k_top_p, top_k_top_p)

}  // namespace kunlun
