// Products of many tokens in float32: a panel of weight rows is transposed once, then each token's features are
// broadcast over its lanes. A sum runs over the features in order.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "core/transpose.h"
#include "core/vec.h"
#include "kernels/linear_plan.h"

namespace kunlun::KUNLUN_ISA {

constexpr int kPanelRows = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kPanelTokens = 12;  // 24 sums in 32 registers
#else
constexpr int kPanelTokens = 6;  // 12 sums in 16 registers
#endif

// 16 or 8 features of kLanes rows to float32, kLanes floats a row; rows from `rows` on are zero.
template <typename T>
void widen_block(const T* from, int64_t stride, int rows, int64_t features, float* to) {
  for (int r = 0; r < kLanes; ++r) {
    Vec v{};
    if (r < rows)
      v = features >= kLanes ? load(from + r * stride) : load_partial(from + r * stride, static_cast<int>(features));
    store(to + r * kLanes, v);
  }
}

// Transposes kPanelRows weight rows to float32: panel[k][row].
template <typename T>
void pack_panel(const LinearArgs& a, int64_t row, float* panel) {
  float block[kLanes * kLanes];
  for (int half = 0; half < 2; ++half) {
    const int64_t first = std::min(row + half * kLanes, a.rows);
    const int rows = static_cast<int>(std::min<int64_t>(kLanes, a.rows - first));
    const T* weight = static_cast<const T*>(a.weight) + first * a.weight_stride;
    for (int64_t k = 0; k < a.features; k += kLanes) {
      const int64_t features = std::min<int64_t>(kLanes, a.features - k);
      widen_block(weight + k, a.weight_stride, rows, features, block);
      for (int64_t quad = 0; quad < features; quad += 4) {
        Vec column[4];
        transpose_quad(block + quad, kLanes * sizeof(float), column);
        for (int64_t c = quad; c < std::min(quad + 4, features); ++c) {
          store(panel + (k + c) * kPanelRows + half * kLanes, column[c - quad]);
        }
      }
    }
  }
}

// Sums of a panel and `Tokens` tokens, whose features are `stride` floats apart: sum[2 * t] and sum[2 * t + 1].
template <int Tokens>
inline void multiply_panel(const float* panel, const float* input, int64_t stride, int64_t features, Vec* sums) {
  Vec sum[2 * Tokens] = {};
  for (int64_t k = 0; k < features; ++k, panel += kPanelRows) {
    const Vec low = load(panel), high = load(panel + kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; ++t) {
      const Vec x = broadcast(input[t * stride + k]);
      sum[2 * t] = fma(low, x, sum[2 * t]);
      sum[2 * t + 1] = fma(high, x, sum[2 * t + 1]);
    }
  }
  // Not std::copy: as a template argument Vec would lose its alignment of 4 bytes.
  for (int i = 0; i < 2 * Tokens; ++i) sums[i] = sum[i];
}

template <typename T, typename Out>
class PanelTask {
 public:
  explicit PanelTask(const LinearArgs& args) : a_(args) {}

  void operator()(const LinearRange& range) const {
    thread_local Scratch panel_scratch, input_scratch;
    float* panel =
        static_cast<float*>(panel_scratch.reserve(static_cast<size_t>(a_.features) * kPanelRows * sizeof(float)));
    const int64_t tokens = range.token_end - range.token;
    float* input = static_cast<float*>(input_scratch.reserve(static_cast<size_t>(tokens * stride()) * sizeof(float)));
    for (int64_t t = 0; t < tokens; ++t) widen_row(range.token + t, input + t * stride());
    for (int64_t row = range.row; row < range.row_end; row += kPanelRows) {
      pack_panel<T>(a_, row, panel);
      multiply_tokens<kPanelTokens>(panel, input, row, range.token, range.token_end);
    }
  }

 private:
  void widen_row(int64_t token, float* to) const {
    const T* from = static_cast<const T*>(a_.input) + token * a_.input_stride;
    int64_t k = 0;
    for (; k + kLanes <= a_.features; k += kLanes) store(to + k, load(from + k));
    for (; k < a_.features; ++k) to[k] = to_float(from[k]);
  }

  template <int Tokens>
  void multiply_tokens(const float* panel, const float* input, int64_t row, int64_t token, int64_t end) const {
    for (; token + Tokens <= end; token += Tokens, input += Tokens * stride()) {
      Vec sums[2 * Tokens];
      multiply_panel<Tokens>(panel, input, stride(), a_.features, sums);
      for (int t = 0; t < Tokens; ++t) store_token(sums + 2 * t, row, token + t);
    }
    if constexpr (Tokens > 1) {
      if (token < end) multiply_tokens<(Tokens + 1) / 2>(panel, input, row, token, end);
    }
  }

  void store_token(const Vec* sums, int64_t row, int64_t token) const {
    Out* out = static_cast<Out*>(a_.out) + token * a_.out_stride;
    for (int half = 0; half < 2; ++half, row += kLanes) {
      const int64_t rows = a_.rows - row;
      if (rows >= kLanes) {
        store(out + row, sums[half] + (a_.bias == nullptr ? Vec{} : load(bias(row))));
      } else if (rows > 0) {
        const int n = static_cast<int>(rows);
        store_partial(out + row, sums[half] + (a_.bias == nullptr ? Vec{} : load_partial(bias(row), n)), n);
      }
    }
  }

  // Not a multiple of 4 KiB, which would put all tokens' features into the same few places of the cache.
  int64_t stride() const { return (a_.features / kLanes + 1 + a_.features / kLanes % 2) * kLanes; }

  const T* bias(int64_t row) const { return static_cast<const T*>(a_.bias) + row; }

  const LinearArgs& a_;
};

}  // namespace kunlun::KUNLUN_ISA
