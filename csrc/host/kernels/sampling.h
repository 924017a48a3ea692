#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

// `logits`: `rows` rows of `vocab` contiguous elements, `stride` elements apart.
struct LogitsView {
  void* data;
  int64_t rows, vocab, stride;
  DType dtype;
};

struct TopKTopPArgs {
  LogitsView logits;     // float32, written
  const int64_t* top_k;  // per row, or nullptr; below 1 or at least vocab: off
  const float* top_p;    // per row, or nullptr; at least 1: off
};

// A temperature below this means greedy choice: the row is not scaled.
constexpr float kGreedyTemperature = 1e-5f;

struct SamplingKernels {
  void (*argmax)(int64_t* ids, const LogitsView&);
  void (*sample)(int64_t* ids, const LogitsView&, const double* uniform);
  void (*min_p)(const LogitsView&, const float* min_p);
  void (*temperature)(const LogitsView&, const float* temperature);
};

struct TopKTopPKernels {
  void (*top_k_top_p)(const TopKTopPArgs&);
};

KUNLUN_DECLARE_TABLE(SamplingKernels, sampling_kernels)
KUNLUN_DECLARE_TABLE(TopKTopPKernels, top_k_top_p_kernels)

}  // namespace kunlun
