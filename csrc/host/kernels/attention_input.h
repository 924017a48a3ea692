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
      : args(args), item(item), group_(static_cast<uint32_t>(args.heads / args.kv_heads)) {
    const int64_t r = item.request;
    keys_ = args.seq_lens != nullptr ? args.seq_lens[r] : args.key_start[r + 1] - args.key_start[r];
    offset_ = keys_ - (args.query_start[r + 1] - args.query_start[r]);
  }

  // The query row of a column: its token, its head, and the token's position in the sequence.
  struct Place {
    int64_t token, head, position;
  };

  Place place(int64_t column) const {
    const uint32_t c = static_cast<uint32_t>(item.column + column);  // 32 bits: a division costs half
    const uint32_t row = c / group_, lane = c % group_;
    return {args.query_start[item.request] + row, item.kv_head * static_cast<int64_t>(group_) + lane, offset_ + row};
  }

  int64_t begin_at(int64_t position) const {
    return args.window_left < 0 ? 0 : std::max<int64_t>(0, position - args.window_left);
  }
  int64_t end_at(int64_t position) const {
    return args.window_right < 0 ? keys_ : std::min(keys_, position + args.window_right + 1);
  }

  // The sink's logit, in powers of two, if this item accounts for it.
  bool has_sink() const { return args.sinks != nullptr && item.first_piece; }

  template <typename T>
  const T* query_row(const Place& p) const {
    return static_cast<const T*>(args.query) + p.token * args.query_token + p.head * args.query_head;
  }

  template <typename T>
  T* out_row(const Place& p) const {
    return static_cast<T*>(args.out) + p.token * args.out_token + p.head * args.out_head;
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

  uint32_t group_;
  int64_t keys_, offset_;
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
