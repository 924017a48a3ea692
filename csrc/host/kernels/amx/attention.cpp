// Attention with the tile matrix unit (AMX) for bf16.
#include "kernels/attention.h"

#include "kernels/amx/attention_rows.h"
#include "kernels/amx/attention_tiles.h"
#include "kernels/attention_run.h"

namespace kunlun::amx {
namespace {

using Bf16 = Method<bf16, AmxTiles, AmxDots, AmxDots::kMostRows>;

BadBlock attention(const AttentionArgs& a) {
  if (a.dtype != DType::kBFloat16) return avx512::attention_kernels.attention(a);
  return run_attention<Bf16>(a);
}

}  // namespace

const AttentionKernels attention_kernels = {attention};

}  // namespace kunlun::amx
