// What the attention kernels share: where keys lie, which of them a query sees, and their working memory.
#pragma once

#include <algorithm>

#include "core/vec.h"
#include "kernels/attention.h"

namespace kunlun::KUNLUN_ISA {

constexpr float kNoLogit = -1e30f;  // the running maximum before any key was seen

// One item: query rows, output rows, visible keys and row pointers of keys and values.
class AttentionInput {
 public:
  AttentionInput(const AttentionArgs& args, const AttentionItem& item)
      : args(args), item(item), group_(args.heads / args.kv_heads) {
    const int64_t r = item.request;
    keys_ = args.seq_lens != nullptr ? args.seq_lens[r] : args.key_start[r + 1] - args.key_start[r];
    offset_ = keys_ - (args.query_start[r + 1] - args.query_start[r]);
  }

  int64_t token_of(int64_t column) const { return args.query_start[item.request] + (item.column + column) / group_; }
  int64_t head_of(int64_t column) const { return item.kv_head * group_ + (item.column + column) % group_; }
  int64_t position_of(int64_t column) const { return offset_ + (item.column + column) / group_; }

  int64_t begin_at(int64_t position) const {
    return args.window_left < 0 ? 0 : std::max<int64_t>(0, position - args.window_left);
  }
  int64_t end_at(int64_t position) const {
    return args.window_right < 0 ? keys_ : std::min(keys_, position + args.window_right + 1);
  }

  // The sink's logit, in powers of two, if this item accounts for it.
  bool has_sink() const { return args.sinks != nullptr && item.first_piece; }

  template <typename T>
  const T* query_row(int64_t column) const {
    return static_cast<const T*>(args.query) + token_of(column) * args.query_token + head_of(column) * args.query_head;
  }

  template <typename T>
  T* out_row(int64_t column) const {
    return static_cast<T*>(args.out) + token_of(column) * args.out_token + head_of(column) * args.out_head;
  }

  // Pointers to the rows of keys [first, first + n). A block id outside the cache is noted and read as block 0.
  template <typename T>
  void rows(const KvRows& source, int64_t first, int64_t n, const T** to) {
    const T* base = static_cast<const T*>(source.data) + item.kv_head * source.head;
    if (args.block_table == nullptr) {
      first += args.key_start[item.request];
      for (int64_t i = 0; i < n; ++i) to[i] = base + (first + i) * source.slot;
      return;
    }
    for (int64_t i = 0; i < n;) {
      const int64_t column = (first + i) / args.block_size;
      const T* block = base + block_id(column) * source.block;
      const int64_t end = std::min(n, (column + 1) * args.block_size - first);
      for (; i < end; ++i) to[i] = block + (first + i - column * args.block_size) * source.slot;
    }
  }

  const AttentionArgs& args;
  const AttentionItem& item;
  BadBlock bad;

 private:
  int64_t block_id(int64_t column) {
    const int64_t id = args.block_table[item.request * args.table_stride + column];
    if (id >= 0 && id < args.num_blocks) return id;
    bad = {item.request, column, id};
    return 0;
  }

  int64_t group_, keys_, offset_;
};

// Where an item's rows go that are to be merged: [rows][head_size], and a maximum and a sum a row. Null: to the output.
struct Partials {
  float *rows = nullptr, *stats = nullptr;
};

// Cuts one piece of memory into aligned buffers; with a null base it only adds up the size.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  void take(T*& buffer, int64_t count) {
    buffer = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace kunlun::KUNLUN_ISA
