#include "core/scratch.h"

#include <cstdlib>
#include <new>

namespace kunlun {

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= capacity_) return memory_;
  std::free(memory_);
  capacity_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  memory_ = std::aligned_alloc(64, capacity_);
  if (memory_ == nullptr) {
    capacity_ = 0;
    throw std::bad_alloc();
  }
  return memory_;
}

}  // namespace kunlun
