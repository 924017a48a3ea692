#include "kernels/attention.h"

#include "kernels/attention_run.h"

namespace kunlun::KUNLUN_ISA {
namespace {

BadBlock attention(const AttentionArgs& a) {
#if defined(__AVX512BF16__)
  if (a.dtype == DType::kBFloat16 && a.head_size % 2 == 0) return run_attention<bf16, PairTiles>(a);
#endif
  BadBlock bad;
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, { bad = run_attention<T, FloatTiles<T>>(a); });
  return bad;
}

}  // namespace

const AttentionKernels attention_kernels = {attention};

}  // namespace kunlun::KUNLUN_ISA
