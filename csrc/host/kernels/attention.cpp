#include "kernels/attention.h"

#include "kernels/attention_run.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kFewRows = 8;

BadBlock attention(const AttentionArgs& a) {
#if defined(__AVX512BF16__)
  if (a.dtype == DType::kBFloat16 && a.head_size % 2 == 0)
    return run_attention<Method<bf16, PairTiles, PairDots, kFewRows>>(a);
#endif
  BadBlock bad;
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, {
    using Floats = Method<T, FloatTiles<T>, FloatDots<T>, kFewRows>;
    bad = run_attention<Floats>(a);
  });
  return bad;
}

}  // namespace

const AttentionKernels attention_kernels = {attention};

}  // namespace kunlun::KUNLUN_ISA
