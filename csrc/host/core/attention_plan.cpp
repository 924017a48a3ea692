#include "core/attention_plan.h"

#include <algorithm>

namespace kunlun {
namespace {

constexpr int64_t kItemsPerThread = 4;

struct Span {
  int64_t begin, end;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t key_count(const AttentionArgs& a, int64_t r) {
  return a.seq_lens != nullptr ? a.seq_lens[r] : a.key_start[r + 1] - a.key_start[r];
}

// Keys that some query row of [first, last] sees.
Span visible_keys(const AttentionArgs& a, int64_t r, int64_t first, int64_t last) {
  const int64_t keys = key_count(a, r);
  const int64_t offset = keys - (a.query_start[r + 1] - a.query_start[r]);
  Span span{0, keys};
  if (a.window_left >= 0) span.begin = std::max<int64_t>(0, offset + first - a.window_left);
  if (a.window_right >= 0) span.end = std::clamp<int64_t>(offset + last + a.window_right + 1, 0, keys);
  span.begin = std::min(span.begin, span.end);
  return span;
}

int64_t cost(const AttentionItem& item) {
  return static_cast<int64_t>(item.columns) * (item.key_end - item.key_begin + 1);
}

int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

int64_t columns_per_item(const AttentionArgs& a, const PlanLimits& limits) {
  const int64_t share = a.query_start[a.requests] * a.heads / (limits.threads * kItemsPerThread * 2);
  return std::clamp(round_up(share, limits.least_columns), limits.least_columns, limits.most_columns);
}

// Uncut items of one request, of at most `most` columns; the blocks that see most keys come first.
void add_request(const AttentionArgs& a, int64_t r, int64_t most, int64_t lanes, std::vector<AttentionItem>& items) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t columns = (a.query_start[r + 1] - a.query_start[r]) * group;
  if (columns == 0) return;
  const int64_t even = round_up(ceil_div(columns, ceil_div(columns, most)), lanes);
  for (int64_t first = (columns - 1) / even * even; first >= 0; first -= even) {
    const int64_t count = std::min(even, columns - first);
    const Span keys = visible_keys(a, r, first / group, (first + count - 1) / group);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      items.push_back({static_cast<int32_t>(r), static_cast<int32_t>(h), static_cast<int32_t>(first),
                       static_cast<int32_t>(count), static_cast<int32_t>(keys.begin), static_cast<int32_t>(keys.end),
                       -1, true});
    }
  }
}

// Cuts item i into `pieces` ranges of keys; the further ones go to the end of the list.
void cut(AttentionPlan& plan, const AttentionItem& whole, int64_t pieces) {
  plan.merges.push_back({static_cast<int32_t>(plan.items.size()), static_cast<int32_t>(pieces)});
  const int64_t keys = whole.key_end - whole.key_begin;
  for (int64_t p = 0; p < pieces; ++p) {
    AttentionItem piece = whole;
    piece.key_begin = static_cast<int32_t>(whole.key_begin + keys * p / pieces);
    piece.key_end = static_cast<int32_t>(whole.key_begin + keys * (p + 1) / pieces);
    piece.partial = plan.partial_rows;
    piece.first_piece = p == 0;
    plan.partial_rows += whole.columns;
    plan.items.push_back(piece);
  }
}

}  // namespace

AttentionPlan::~AttentionPlan() = default;

void plan_attention(const AttentionArgs& a, const PlanLimits& limits, AttentionPlan& plan) {
  static thread_local std::vector<AttentionItem> whole;
  whole.clear();
  plan.items.clear();
  plan.merges.clear();
  plan.partial_rows = 0;
  const int64_t columns = columns_per_item(a, limits);
  for (int64_t r = 0; r < a.requests; ++r) add_request(a, r, columns, limits.lanes, whole);
  int64_t total = 0;
  for (const AttentionItem& item : whole) total += cost(item);
  const int64_t share = limits.threads > 1 ? ceil_div(total, limits.threads * kItemsPerThread) : total;
  for (const AttentionItem& item : whole) {
    const int64_t pieces = std::min(ceil_div(cost(item), std::max<int64_t>(share, 1)),
                                    (item.key_end - item.key_begin) / limits.least_keys);
    if (pieces > 1) {
      cut(plan, item, pieces);
    } else {
      plan.items.push_back(item);
    }
  }
}

}  // namespace kunlun
