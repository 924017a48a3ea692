// Rows of logits, cut into blocks: what the sampling kernels share.
#pragma once

#include <algorithm>
#include <vector>

#include "core/softmax.h"
#include "core/thread_pool.h"
#include "kernels/sampling.h"

namespace kunlun::KUNLUN_ISA {

// Calls body(row) for every row: rows in parallel where that fills the threads evenly, else one after the other, and
// then the loops inside body run in parallel (inside a parallel loop they run serially).
template <typename Body>
void for_rows(int64_t rows, Body&& body) {
  const int64_t threads = num_threads();
  if (rows >= 4 * threads || rows % threads == 0) {
    parallel_for(rows, body);
  } else {
    for (int64_t row = 0; row < rows; ++row) body(row);
  }
}

// A row cut into blocks of `size` elements, the last one shorter.
struct Blocks {
  int64_t total, size;

  int64_t count() const { return (total + size - 1) / size; }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t length(int64_t block) const { return std::min(size, total - block * size); }

  // Calls body(block) for every block, in parallel for long rows.
  template <typename Body>
  void for_each(Body&& body) const {
    constexpr int64_t kElementsPerTask = 16384;
    parallel_ranges(count(), kElementsPerTask / size + 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) body(block);
    });
  }
};

// Scratch of the calling thread, which only grows. The content is lost at the next call with the same tag.
template <typename Tag, typename T>
T* scratch(int64_t size) {
  thread_local std::vector<T> buffer;
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(static_cast<size_t>(size));
  return buffer.data();
}

// x[i] = -infinity where x[i] < threshold or x[i] is NaN.
inline void mask_below(float* x, int64_t n, float threshold) {
  const Vec none = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    store(x + i, v >= threshold ? v : none);
  }
  for (; i < n; ++i) x[i] = x[i] >= threshold ? x[i] : -kInfinity;
}

// The same for a whole row, of which the maximum of every block is known: most blocks are only filled.
inline void mask_blocks_below(float* row, const Blocks& blocks, const float* maxima, float threshold) {
  blocks.for_each([&](int64_t block) {
    float* x = row + blocks.begin(block);
    if (maxima[block] < threshold) {
      std::fill_n(x, blocks.length(block), -kInfinity);
    } else {
      mask_below(x, blocks.length(block), threshold);
    }
  });
}

}  // namespace kunlun::KUNLUN_ISA
