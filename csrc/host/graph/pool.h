// Memory for what a recorded step computes on the way. Blocks that a capture gave back are used again, by the same
// capture and by later ones, and stay where they are until the pool goes: a replay finds them at the same addresses.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace kunlun {

class BlockPool {
 public:
  // 64-byte aligned.
  void* take(size_t bytes);
  void give_back(void* block);

  bool owns(const void* block) const;
  size_t bytes() const;

 private:
  struct Free {
    void operator()(void* p) const { ::free(p); }
  };

  mutable std::mutex mutex_;
  std::map<const void*, size_t> sizes_;
  std::multimap<size_t, void*> unused_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  size_t bytes_ = 0;
};

}  // namespace kunlun
