#pragma once

#include <cstdint>

#include "core/attention_plan.h"
#include "core/dispatch.h"

namespace kunlun {

// A block id that lies outside the cache; found() when there was one.
struct BadBlock {
  int64_t request = -1, column = 0, id = 0;
  bool found() const { return request >= 0; }
};

struct AttentionKernels {
  BadBlock (*attention)(const AttentionArgs&);
};

KUNLUN_DECLARE_TABLE(AttentionKernels, attention_kernels)

namespace amx {
extern const AttentionKernels attention_kernels;
}

inline const AttentionKernels& best_attention_kernels() {
  return active_isa() == Isa::kAmx ? amx::attention_kernels : attention_kernels_for(active_isa());
}

}  // namespace kunlun
