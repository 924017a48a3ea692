#include "graph/recorder.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "core/ahead.h"

namespace kunlun {
namespace {

// The key that torch provides for modes written in C++: no kernel but the fallback below is registered for it, and it
// stands above every other key, so that an op is seen once, before it is decomposed.
constexpr auto kRecording = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local Graphs* tls_recorder = nullptr;

void set_recorder(Graphs* recorder) {
  tls_recorder = recorder;
  c10::impl::tls_set_dispatch_key_included(kRecording, recorder != nullptr);
}

void record_call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kRecording);
  tls_recorder->record(op, stack);
}

const std::set<std::string>& allocating_ops() {
  static const std::set<std::string> names = {"aten::empty",     "aten::empty_like",        "aten::empty_strided",
                                              "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted"};
  return names;
}

// Whether `value` holds a boolean tensor: indexing with one yields as many rows as are true.
bool is_mask(const c10::IValue& value) {
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef()) {
    if (item.isTensor() && item.toTensor().defined() && item.toTensor().scalar_type() == at::kBool) return true;
  }
  return false;
}

void refuse_decisions(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& schema = op.schema();
  const bool decides = op.hasTag(at::Tag::data_dependent_output);
  const bool sized_by_data =
      op.hasTag(at::Tag::dynamic_output_shape) &&
      (schema.name() != "aten::index" || std::any_of(arguments.begin(), arguments.end(), is_mask));
  TORCH_CHECK(!decides && !sized_by_data, "Kunlun Graph cannot capture ", c10::toString(schema.operator_name()),
              decides ? ": Python reads its result" : ": the shape of its result depends on values");
}

template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) visit_tensors(item, visit);
  }
}

bool shares_memory(const at::Tensor& tensor, c10::ArrayRef<c10::IValue> arguments) {
  bool shares = false;
  const auto compare = [&](const at::Tensor& other) {
    shares = shares || (other.has_storage() && tensor.storage().is_alias_of(other.storage()));
  };
  for (const c10::IValue& argument : arguments) visit_tensors(argument, compare);
  return shares;
}

// Of a functional op of torch: an op that only returns views, or shapes, does nothing when it runs again.
bool belongs_to_torch(const c10::FunctionSchema& schema) {
  return schema.name().rfind("aten::", 0) == 0 || schema.name().rfind("prim::", 0) == 0;
}

// What a product multiplies with; nothing for other ops.
GraphWeights weights_of(const GraphCall& call) {
  const auto& schema = call.op.schema();
  if (schema.name() != "kunlun::linear" && schema.name() != "kunlun::logits") return {};
  const auto index = schema.argumentIndexWithName("weight");
  const at::Tensor& weight = call.arguments.at(static_cast<size_t>(*index)).toTensor();
  return {weight.const_data_ptr(), weight.size(0), weight.stride(0) * weight.element_size()};
}

void note_next_weights(Recording* recording) {
  GraphWeights next;
  for (auto call = recording->rbegin(); call != recording->rend(); ++call) {
    call->next_weights = next;
    const GraphWeights own = weights_of(*call);
    if (own.data != nullptr) next = own;
  }
}

void run_call(const GraphCall& call, torch::jit::Stack* stack) {
  if (call.next_weights.data != nullptr) {
    announce(call.next_weights.data, call.next_weights.rows, call.next_weights.row_bytes);
  }
  stack->assign(call.arguments.begin(), call.arguments.end());
  call.op.callBoxed(stack);
  for (const auto& [index, kept] : call.results) kept.copy_((*stack)[index].toTensor());
}

c10::ArrayRef<c10::IValue> last(const torch::jit::Stack& stack, size_t count) {
  return c10::ArrayRef<c10::IValue>(stack.data() + stack.size() - count, count);
}

}  // namespace

void Graphs::begin() {
  TORCH_CHECK(tls_recorder == nullptr, "Kunlun Graph: this thread is recording already");
  recording_.clear();
  set_recorder(this);
}

void Graphs::cancel() {
  if (tls_recorder == this) set_recorder(nullptr);
  recording_.clear();
}

int64_t Graphs::end() {
  TORCH_CHECK(tls_recorder == this, "Kunlun Graph: this thread is not recording");
  set_recorder(nullptr);
  note_next_weights(&recording_);
  graphs_.push_back(std::move(recording_));
  recording_.clear();
  return static_cast<int64_t>(graphs_.size()) - 1;
}

void Graphs::record(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = last(*stack, schema.arguments().size());
  refuse_decisions(op, arguments);
  const torch::jit::Stack given(arguments.begin(), arguments.end());
  const size_t first = stack->size() - given.size();
  op.callBoxed(stack);
  if (allocating_ops().count(schema.name()) != 0) return move_to_pool(stack, first);
  GraphCall call{op, {}, {}, {}};
  for (size_t i = first; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](const at::Tensor& t) {
      if (t.has_storage() && !shares_memory(t, given)) call.results.emplace_back(i - first, at::Tensor());
    });
  }
  if (belongs_to_torch(schema) && !schema.is_mutable() && call.results.empty()) return;
  keep_results(&call, stack, first);
  for (const c10::IValue& argument : given) call.arguments.push_back(weak(argument));
  recording_.push_back(std::move(call));
}

// Results that the op allocated: the step goes on with a copy in the pool, which a replay fills again.
void Graphs::keep_results(GraphCall* call, torch::jit::Stack* stack, size_t first) const {
  for (auto& [index, kept] : call->results) {
    c10::IValue& result = (*stack)[first + index];
    TORCH_CHECK(result.isTensor(), "Kunlun Graph cannot capture ", c10::toString(call->op.operator_name()),
                ": it returns a list of new tensors");
    const at::Tensor copy = pooled_like(result.toTensor());
    copy.copy_(result.toTensor());
    kept = alias(copy);
    result = copy;
  }
}

void Graphs::move_to_pool(torch::jit::Stack* stack, size_t first) const {
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = pooled_like((*stack)[i].toTensor());
}

at::Tensor Graphs::pooled_like(const at::Tensor& tensor) const {
  void* block = pool_->take(tensor.storage().nbytes());
  const auto release = [pool = pool_](void* used) { pool->give_back(used); };
  return at::from_blob(block, tensor.sizes(), tensor.strides(), release, tensor.options());
}

at::Tensor Graphs::alias(const at::Tensor& tensor) const {
  if (!tensor.has_storage() || !pool_->owns(tensor.storage().data())) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
}

c10::IValue Graphs::weak(const c10::IValue& value) const {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(alias(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(alias(tensor));
    return list;
  }
  if (!value.isList()) return value;
  c10::impl::GenericList list(value.toList().elementType());
  for (const c10::IValue& item : value.toListRef()) list.push_back(weak(item));
  return list;
}

void Graphs::replay(int64_t graph) const {
  torch::jit::Stack stack;
  for (const GraphCall& call : graphs_.at(static_cast<size_t>(graph))) run_call(call, &stack);
}

std::vector<double> Graphs::replay_timed(int64_t graph) const {
  using Clock = std::chrono::steady_clock;
  torch::jit::Stack stack;
  std::vector<double> seconds;
  for (const GraphCall& call : graphs_.at(static_cast<size_t>(graph))) {
    const auto start = Clock::now();
    run_call(call, &stack);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

std::vector<std::string> Graphs::op_names(int64_t graph) const {
  std::vector<std::string> names;
  for (const GraphCall& call : graphs_.at(static_cast<size_t>(graph))) {
    names.push_back(c10::toString(call.op.operator_name()));
  }
  return names;
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_call>());
}

TORCH_LIBRARY_FRAGMENT(kunlun_host, m) {
  m.class_<Graphs>("Graphs")
      .def(torch::init<>())
      .def("begin", &Graphs::begin)
      .def("cancel", &Graphs::cancel)
      .def("end", &Graphs::end)
      .def("replay", [](const c10::intrusive_ptr<Graphs>& self, int64_t graph) { self->replay(graph); })
      .def("replay_timed",
           [](const c10::intrusive_ptr<Graphs>& self, int64_t graph) { return self->replay_timed(graph); })
      .def("alias", [](const c10::intrusive_ptr<Graphs>& self, const at::Tensor& t) { return self->alias(t); })
      .def("op_names", [](const c10::intrusive_ptr<Graphs>& self, int64_t graph) { return self->op_names(graph); })
      .def("pool_bytes", [](const c10::intrusive_ptr<Graphs>& self) { return self->pool_bytes(); });
}

}  // namespace kunlun
