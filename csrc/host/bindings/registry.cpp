// The provider's list of ops, and the few functions that configure the library.
#include <map>
#include <memory>
#include <vector>

#include "bindings/common.h"
#include "core/thread_pool.h"

namespace kunlun {
namespace {

std::map<std::string, Binder>& binders() {
  static std::map<std::string, Binder> table;
  return table;
}

// Registers the named ops for CPU tensors, in place of whatever served them; they are defined by the op contract in
// Python.
void bind(const std::vector<std::string>& names) {
  static torch::Library library(torch::Library::IMPL, "kunlun", c10::DispatchKey::CPU, __FILE__, __LINE__);
  for (const auto& name : names) {
    const auto it = binders().find(name);
    TORCH_CHECK(it != binders().end(), "kunlun_host: there is no host kernel for op '", name, "'");
    it->second(library);
  }
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const auto& [name, binder] : binders()) names.push_back(name);
  return names;
}

void set_isa_limit(const std::string& name) { limit_isa(name); }
std::string instruction_set() { return isa_name(active_isa()); }
std::string detected_instruction_set() { return isa_name(detect_isa()); }
int64_t thread_count() { return num_threads(); }

void set_threads(int64_t threads, const std::vector<int64_t>& cpus, int64_t spin_us) {
  TORCH_CHECK(threads >= 1, "kunlun_host: the number of kernel threads must be at least 1, not ", threads);
  configure_threads(static_cast<int>(threads), std::vector<int>(cpus.begin(), cpus.end()), spin_us);
}

}  // namespace

int add_host_op(const char* name, Binder binder) {
  binders()[name] = binder;
  return 0;
}

DType dtype_of(const at::Tensor& tensor, const char* op, const char* argument) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, op, ": ", argument, " must be float32, bfloat16 or float16, not ", tensor.scalar_type());
  }
}

void check_rows(const at::Tensor& tensor, const char* op, const char* argument) {
  TORCH_CHECK(tensor.dim() >= 1, op, ": ", argument, " must have at least one dimension");
  TORCH_CHECK(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, op, ": the last dimension of ", argument,
              " must be contiguous, its stride is ", tensor.stride(-1));
}

Rows rows_of(const at::Tensor& tensor, const char* op, const char* argument) {
  check_rows(tensor, op, argument);
  const int64_t cols = tensor.size(-1);
  int64_t rows = 1, stride = cols;
  bool started = false;
  for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (!started) stride = tensor.stride(d);
    TORCH_CHECK(!started || tensor.numel() == 0 || tensor.stride(d) == stride * rows, op, ": the rows of ", argument,
                " are not evenly spaced; call .contiguous() on it");
    started = true;
    rows *= tensor.size(d);
  }
  return {rows, cols, stride};
}

TORCH_LIBRARY(kunlun_host, m) {
  m.def("bind", bind);
  m.def("op_names", op_names);
  m.def("set_isa_limit", set_isa_limit);
  m.def("instruction_set", instruction_set);
  m.def("detected_instruction_set", detected_instruction_set);
  m.def("set_threads", set_threads);
  m.def("thread_count", thread_count);
}

}  // namespace kunlun
