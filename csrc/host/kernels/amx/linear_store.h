// From tiles of sums, [weight row, token], to the output, [token, row].
#pragma once

#include <algorithm>

#include "core/transpose.h"
#include "core/vec.h"
#include "kernels/linear.h"

namespace kunlun::amx {

constexpr int64_t kTileSums = 256;

// 32 consecutive rows of one token, those in the mask.
inline void store_rows(float* to, __m512 low, __m512 high, __mmask32 rows) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(rows), low);
  _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(rows >> 16), high);
}
inline void store_rows(bf16* to, __m512 low, __m512 high, __mmask32 rows) {
  _mm512_mask_storeu_epi16(to, rows, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

// A block of sums, [2 row tiles, token tiles, 16 rows, 16 tokens], that is written out four tokens at a time.
template <typename Out>
class PendingStore {
 public:
  PendingStore() = default;
  PendingStore(const LinearArgs& a, const float* sums, int64_t row, int64_t token, int token_tiles)
      : args_(&a), sums_(sums), row_(row), token_(token), token_tiles_(token_tiles), left_(token_tiles * 4) {
    const int64_t rows = std::min<int64_t>(32, a.rows - row);
    mask_ = rows == 32 ? ~__mmask32{0} : (__mmask32{1} << rows) - 1;
  }

  // Brings the cache lines of two tokens close, so that storing them later does not wait for memory.
  void prefetch(int64_t step) const {
    const int64_t token = token_ + 2 * step;
    if (step >= 8 * token_tiles_ || token >= args_->tokens) return;
    __builtin_prefetch(out(token), 1, 3);
    __builtin_prefetch(out(token + 1), 1, 3);
  }

  void advance() {
    if (left_ == 0) return;
    --left_;
    store_quad(left_ / 4, left_ % 4 * 4);
  }

  void finish() {
    while (left_ > 0) advance();
  }

 private:
  Out* out(int64_t token) const { return static_cast<Out*>(args_->out) + token * args_->out_stride + row_; }

  void store_quad(int tile, int first) const {
    const int64_t token = token_ + tile * 16 + first;
    const int64_t tokens = args_->tokens - token;
    if (tokens <= 0) return;
    Vec low[4], high[4];
    transpose_quad(sums_ + tile * kTileSums + first, 64, low);
    transpose_quad(sums_ + (token_tiles_ + tile) * kTileSums + first, 64, high);
    const __m512 low_bias = bias(0), high_bias = bias(16);
    for (int t = 0; t < 4; ++t) {
      if (t == tokens) return;
      store_rows(out(token + t), low[t] + low_bias, high[t] + high_bias, mask_);
    }
  }

  __m512 bias(int first_row) const {
    if (args_->bias == nullptr) return _mm512_setzero_ps();
    const bf16* from = static_cast<const bf16*>(args_->bias) + row_ + first_row;
    const __m256i narrow = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask_ >> first_row), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
  }

  const LinearArgs* args_ = nullptr;
  const float* sums_ = nullptr;
  int64_t row_ = 0, token_ = 0;
  __mmask32 mask_ = 0;
  int token_tiles_ = 0, left_ = 0;
};

}  // namespace kunlun::amx
