// One pool of kernel threads per process. The calling thread takes part, so a pool of n threads starts n - 1.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace kunlun {

// Sets the number of threads (including the caller's) and, if not empty, the CPU each one is pinned to
// (cpus[0] pins the calling thread). Idle threads spin for `spin_us` microseconds, then sleep.
void configure_threads(int num_threads, const std::vector<int>& cpus, int64_t spin_us);

int num_threads();

// Index of the calling thread in the pool, 0 to num_threads() - 1: for per-thread scratch.
int thread_index();

namespace detail {
void run(int64_t num_tasks, void (*body)(void*, int64_t), void* context);
}

// Calls body(i) for every i in [0, num_tasks) on the threads of the pool; returns when all are done. Thread t of T
// begins at num_tasks * t / T and goes on from there; a thread without tasks takes those of others, from the end. Tasks
// are claimed one at a time: a thread that the system preempts delays only its own task. Calls from inside a task run
// serially. An exception must not leave the body.
template <typename Body>
void parallel_for(int64_t num_tasks, Body&& body) {
  if (num_tasks <= 0) return;
  auto call = [](void* context, int64_t index) { (*static_cast<std::remove_reference_t<Body>*>(context))(index); };
  detail::run(num_tasks, call, const_cast<void*>(static_cast<const void*>(&body)));
}

// Splits [0, n) into ranges of at least `grain` elements and calls body(begin, end) on each.
template <typename Body>
void parallel_ranges(int64_t n, int64_t grain, Body&& body) {
  const int64_t most = static_cast<int64_t>(num_threads()) * 4;
  const int64_t wanted = (n + grain - 1) / grain;
  const int64_t parts = wanted < most ? wanted : most;
  if (parts <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  parallel_for(parts, [&](int64_t part) { body(n * part / parts, n * (part + 1) / parts); });
}

}  // namespace kunlun
