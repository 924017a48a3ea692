// Grow-only working memory, to be held in a thread_local: after the first steps a kernel allocates nothing.
#pragma once

#include <cstddef>

namespace kunlun {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes` bytes, aligned to 64. What an earlier call returned is lost when the memory grows.
  void* reserve(size_t bytes);

 private:
  void* memory_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace kunlun
