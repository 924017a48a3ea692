// Kunlun Graph on the host: the ops of one step, written down while they run, and run again without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <vector>

#include "graph/pool.h"

namespace kunlun {

// A matrix of weights.
struct GraphWeights {
  const void* data = nullptr;
  int64_t rows = 0, row_bytes = 0;
};

// One op: its arguments, where results that it allocates itself have to end up, and which weights are needed after it.
struct GraphCall {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  std::vector<std::pair<size_t, at::Tensor>> results;
  GraphWeights next_weights;
};

using Recording = std::vector<GraphCall>;

// The graphs of one model. They share a pool, so only one graph's output is valid at a time.
class Graphs : public torch::CustomClassHolder {
 public:
  // Until end(), every op this thread runs is recorded. What a step reads must lie in tensors that live on: they are
  // kept, and read again at their addresses. Raises on an op whose result Python would decide upon.
  void begin();
  // Ends a recording without keeping it. Also allowed when none was begun.
  void cancel();
  // The number of the new graph.
  int64_t end();
  void replay(int64_t graph) const;
  // Replays it and returns the seconds of each op.
  std::vector<double> replay_timed(int64_t graph) const;

  // A tensor over the same memory that does not keep the pool from using it again.
  at::Tensor alias(const at::Tensor& tensor) const;
  std::vector<std::string> op_names(int64_t graph) const;
  int64_t pool_bytes() const { return static_cast<int64_t>(pool_->bytes()); }

  // Called for each op of a recording.
  void record(const c10::OperatorHandle& op, torch::jit::Stack* stack);

 private:
  at::Tensor pooled_like(const at::Tensor& tensor) const;
  c10::IValue weak(const c10::IValue& value) const;
  void keep_results(GraphCall* call, torch::jit::Stack* stack, size_t first) const;
  void move_to_pool(torch::jit::Stack* stack, size_t first) const;

  std::shared_ptr<BlockPool> pool_ = std::make_shared<BlockPool>();
  std::vector<Recording> graphs_;
  Recording recording_;
};

}  // namespace kunlun
