#include "core/ahead.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "core/thread_pool.h"

namespace kunlun {
namespace {

constexpr int64_t kLine = 64;

// Fields change one by one while other threads read them: what is then fetched in vain does no harm.
struct Announced {
  std::atomic<const char*> data{nullptr};
  std::atomic<int64_t> rows{0}, row_bytes{0};
  std::atomic<uint64_t> number{0};
};

Announced announced;

struct Part {
  uint64_t number = 0;
  const char* next = nullptr;
  const char* end = nullptr;
};

thread_local Part part;

// A part of the second-level cache: the kernel that runs meanwhile needs the rest.
int64_t most_bytes() {
  static const int64_t bytes = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 512 << 10) / 4;
  return bytes;
}

Part part_of_this_thread(uint64_t number) {
  const int64_t rows = announced.rows.load(std::memory_order_relaxed);
  const int64_t row_bytes = announced.row_bytes.load(std::memory_order_relaxed);
  const int64_t first = rows * thread_index() / num_threads(), last = rows * (thread_index() + 1) / num_threads();
  const char* next = announced.data.load(std::memory_order_relaxed) + first * row_bytes;
  return {number, next, next + std::min((last - first) * row_bytes, most_bytes())};
}

}  // namespace

void announce(const void* data, int64_t rows, int64_t row_bytes) {
  if (announced.data.load(std::memory_order_relaxed) == data) return;
  announced.data.store(static_cast<const char*>(data), std::memory_order_relaxed);
  announced.rows.store(rows, std::memory_order_relaxed);
  announced.row_bytes.store(row_bytes, std::memory_order_relaxed);
  announced.number.fetch_add(1, std::memory_order_release);
}

bool fetch_ahead(int lines) {
  const uint64_t number = announced.number.load(std::memory_order_acquire);
  if (part.number != number) part = part_of_this_thread(number);
  if (part.next >= part.end) return false;
  for (int i = 0; i < lines; ++i, part.next += kLine) __builtin_prefetch(part.next, 0, 2);
  return true;
}

}  // namespace kunlun
