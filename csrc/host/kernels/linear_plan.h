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

// What the innermost kernel takes at once, bytes of an element, and how many bytes of tokens the second-level cache
// holds beside the weights that pass through.
struct LinearUnits {
  int64_t rows, tokens, element_bytes, token_bytes;
};

// A task is `rows` weight rows times `tokens` tokens. Its tokens stay in the second-level cache while they are read
// again for every few rows; a weight row comes from memory once per task.
struct LinearPlan {
  int64_t rows, tokens;
  int64_t row_tasks, token_tasks;
};

struct LinearRange {
  int64_t row, row_end, token, token_end;
};

inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Needs at least one token.
inline LinearPlan plan_linear(const LinearArgs& a, const LinearUnits& unit) {
  constexpr int64_t kTasksPerThread = 8;
  constexpr int64_t kMostRows = 256;
  const int64_t fit = unit.token_bytes / (a.features * unit.element_bytes + 1);
  LinearPlan p{};
  p.token_tasks = divide_up(a.tokens, std::max(fit, unit.tokens));
  p.tokens = divide_up(divide_up(a.tokens, p.token_tasks), unit.tokens) * unit.tokens;
  p.token_tasks = divide_up(a.tokens, p.tokens);
  const int64_t wanted = std::max<int64_t>(num_threads() * kTasksPerThread / p.token_tasks, 1);
  p.rows = std::max(std::min(a.rows / wanted, kMostRows) / unit.rows * unit.rows, unit.rows);
  p.row_tasks = divide_up(a.rows, p.rows);
  return p;
}

// Calls body(range) for each task, on any thread of the pool.
template <typename Body>
void parallel_tasks(const LinearArgs& a, const LinearPlan& p, Body&& body) {
  parallel_for(p.row_tasks * p.token_tasks, [&](int64_t task) {
    const int64_t row = task / p.token_tasks * p.rows;
    const int64_t token = task % p.token_tasks * p.tokens;
    body(LinearRange{row, std::min(row + p.rows, a.rows), token, std::min(token + p.tokens, a.tokens)});
  });
}

}  // namespace kunlun::KUNLUN_ISA
