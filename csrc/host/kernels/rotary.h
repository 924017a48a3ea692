#pragma once

#include <cstdint>

#include "core/dispatch.h"

namespace kunlun {

constexpr int64_t kMaxHeadSize = 1024;  // the kernels keep one head's angles and weights on the stack

// [tokens, num_heads, head_size] with contiguous heads; strides are in elements. No heads: not there.
struct HeadView {
  void* data;
  int64_t num_heads, token_stride, head_stride;
};

// A cache row holds the cosines of rotary_dim / 2 angles, then their sines.
struct RotaryAngles {
  const int64_t* positions;
  const void* cache;
  int64_t cache_stride, rotary_dim;
  DType cache_dtype;
  bool is_neox;  // pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1)
};

// Rotates the heads in place.
struct RotaryArgs {
  HeadView query, key;
  RotaryAngles angles;
  int64_t tokens, head_size;
  DType dtype;
};

struct HeadNorm {
  const void* weight;  // [head_size], or nullptr: no norm
  DType weight_dtype;
};

// A row of qkv holds the query heads, the key heads, the value heads.
struct SplitNormRopeArgs {
  HeadView query, key, value;
  const void* qkv;
  int64_t qkv_stride;
  RotaryAngles angles;
  HeadNorm query_norm, key_norm;
  float epsilon, weight_offset;
  int64_t tokens, head_size;
  DType dtype;
};

struct RotaryKernels {
  void (*rotary_embedding)(const RotaryArgs&);
  void (*split_norm_rope)(const SplitNormRopeArgs&);
};

KUNLUN_DECLARE_TABLE(RotaryKernels, rotary_kernels)

}  // namespace kunlun
