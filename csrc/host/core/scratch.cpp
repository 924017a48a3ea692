#include "core/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace kunlun {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= capacity_) return memory_;
  std::free(memory_);
  const size_t page = bytes < kHugePage ? kPage : kHugePage;
  capacity_ = (bytes + bytes / 4 + page - 1) / page * page;
  memory_ = std::aligned_alloc(page, capacity_);
  if (memory_ == nullptr) {
    capacity_ = 0;
    throw std::bad_alloc();
  }
  if (page == kHugePage) madvise(memory_, capacity_, MADV_HUGEPAGE);  // best effort: fewer address translations
  return memory_;
}

}  // namespace kunlun
