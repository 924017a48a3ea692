#include "graph/pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace kunlun {
namespace {

constexpr size_t kLine = 64;

}  // namespace

// The smallest unused block that fits, unless it is more than twice as large.
void* BlockPool::take(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = std::max(kLine, (bytes + kLine - 1) / kLine * kLine);
  const auto it = unused_.lower_bound(size);
  if (it != unused_.end() && it->first <= 2 * size) {
    void* block = it->second;
    unused_.erase(it);
    return block;
  }
  memory_.emplace_back(std::aligned_alloc(kLine, size));
  if (memory_.back() == nullptr) throw std::bad_alloc();
  sizes_[memory_.back().get()] = size;
  bytes_ += size;
  return memory_.back().get();
}

void BlockPool::give_back(void* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  unused_.emplace(sizes_.at(block), block);
}

bool BlockPool::owns(const void* block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sizes_.count(block) != 0;
}

size_t BlockPool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

}  // namespace kunlun
