// How a product is cut into tasks, the same way at every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"
#include "kernels/linear.h"

#ifndef KUNLUN_ISA
#error "KUNLUN_ISA must name the instruction set's namespace"
#endif

namespace kunlun::KUNLUN_ISA {

// A task is `rows` weight rows times `tokens` tokens. Its tokens stay in the second-level cache while they are read again
// for every few rows; a weight row comes from memory once per task.
struct LinearPlan {
  int64_t rows, tokens;
  int64_t row_tasks, token_tasks;
};

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// `row_unit` and `token_unit`: what the innermost kernel takes at once. `token_bytes`: of the tokens of a task.
inline LinearPlan plan_linear(const LinearArgs& a, int64_t row_unit, int64_t token_unit, int64_t element,
                              int64_t token_bytes) {
  constexpr int64_t kTasksPerThread = 8;
  constexpr int64_t kMostRows = 256;
  const int64_t fit = token_bytes / (a.features * element + 1) / token_unit * token_unit;
  LinearPlan p{};
  p.tokens = std::max(std::min(round_up(a.tokens, token_unit), fit), token_unit);
  p.token_tasks = (a.tokens + p.tokens - 1) / p.tokens;
  p.tokens = round_up((a.tokens + p.token_tasks - 1) / std::max<int64_t>(p.token_tasks, 1), token_unit);
  const int64_t wanted = std::max<int64_t>(num_threads() * kTasksPerThread / std::max<int64_t>(p.token_tasks, 1), 1);
  p.rows = std::max(std::min(a.rows / wanted, kMostRows) / row_unit * row_unit, row_unit);
  p.row_tasks = (a.rows + p.rows - 1) / p.rows;
  return p;
}

// Calls body(first_row, end_row, first_token, end_token) for each task, on any thread of the pool.
template <typename Body>
void parallel_tasks(const LinearArgs& a, const LinearPlan& p, Body&& body) {
  parallel_for(p.row_tasks * p.token_tasks, [&](int64_t task) {
    const int64_t row = task / p.token_tasks * p.rows;
    const int64_t token = task % p.token_tasks * p.tokens;
    body(row, std::min(row + p.rows, a.rows), token, std::min(token + p.tokens, a.tokens));
  });
}

}  // namespace kunlun::KUNLUN_ISA
