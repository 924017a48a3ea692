// Attention of a few query rows on the tile matrix unit, for bf16. See kernels/attention_dots.h for the interface.
#pragma once

#include "kernels/amx/tile_state.h"
#include "kernels/attention_dots.h"

namespace kunlun::amx {

// Up to 16 query rows. Logits come as keys · queryᵀ, 16 keys at a time, so that keys are read as they lie; values are
// interleaved in pairs of keys, 32 keys and 64 elements at a time.
class AmxDots {
 public:
  using Query = uint32_t;
  using Weight = bf16;
  static constexpr int kKeyStep = 32;
  static constexpr int64_t kMostRows = 16;

  AmxDots(int64_t size, int64_t rows)
      : state_(static_cast<int>(rows), kFewRowTiles), size_(size), rows_(rows), stride_(round_up(size, kPart)) {}
  int64_t stride() const { return stride_; }
  int64_t query_size() const { return stride_ / 2 * kMostRows; }

  // [stride / 2][16] pairs.
  void pack_query(uint32_t* to, int64_t r, const bf16* from) const {
    for (int64_t pair = 0; pair < size_ / 2; ++pair) std::memcpy(to + pair * kMostRows + r, from + 2 * pair, 4);
    if (size_ % 2 != 0) to[size_ / 2 * kMostRows + r] = from[size_ - 1].bits;
  }

  void logits(const uint32_t* query, const bf16* const* keys, float* to) {
    for (int64_t k = 0; k < kKeyStep; k += 16) {
      const bool direct = size_ % 32 == 0 && evenly_spaced(keys + k);
      _tile_zero(6);
      for (int64_t d = 0; d < size_; d += 32) {
        if (direct) {
          _tile_loadd(7, keys[k] + d, (keys[k + 1] - keys[k]) * 2);
        } else {
          copy_keys(keys + k, d);
          _tile_loadd(7, pairs_, 64);
        }
        _tile_loadd(5, query + d / 2 * kMostRows, 64);
        _tile_dpbf16ps(6, 7, 5);
      }
      _tile_stored(6, square_, 64);
      transpose_rows(to + k);
    }
  }

  void accumulate(float* result, const bf16* weights, const bf16* const* values, int64_t n) {
    for (int64_t d = 0; d < stride_; d += kPart) accumulate_part(result + d, weights, values, n, d);
  }

  void restore_order(float* row) const {
    for (int64_t d = 0; d < stride_; d += PairDots::kStep) PairDots::restore_step(row + d);
  }

 private:
  static constexpr int kFewRowTiles = 5;  // tiles 0 to 4 have as many rows as there are queries
  static constexpr int64_t kPart = 64;

  static bool evenly_spaced(const bf16* const* rows) {
    const int64_t step = rows[1] - rows[0];
    bool even = true;
    for (int k = 2; k < 16; ++k) even &= rows[k] - rows[k - 1] == step;
    return even;
  }

  // Elements d to d + 31 of 16 keys.
  void copy_keys(const bf16* const* rows, int64_t d) {
    for (int64_t k = 0; k < 16; ++k) {
      _mm512_store_si512(pairs_ + 16 * k, PairDots::load_part(rows[k] + d, size_ - d));
    }
  }

  // [16 keys][queries] to rows of 16 logits.
  void transpose_rows(float* to) const {
    Vec square[16];
    KUNLUN_UNROLL
    for (int i = 0; i < 16; ++i) square[i] = load(square_ + 16 * i);
    transpose_square(square);
    for (int64_t r = 0; r < rows_; ++r) store(to + r * kSpanKeys, square[r]);
  }

  void accumulate_part(float* result, const bf16* weights, const bf16* const* values, int64_t n, int64_t d) {
    const int64_t bytes = stride_ * 4;
    _tile_loadd(0, result, bytes);
    _tile_loadd(1, result + 16, bytes);
    _tile_loadd(2, result + 32, bytes);
    _tile_loadd(3, result + 48, bytes);
    for (int64_t k = 0; k < n; k += 32) {
      interleave(values + k, d);
      _tile_loadd(4, weights + k, kSpanKeys * 2);
      _tile_loadd(5, pairs_, kPart * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, pairs_ + 16, kPart * 4);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, pairs_ + 32, kPart * 4);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, pairs_ + 48, kPart * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, result, bytes);
    _tile_stored(1, result + 16, bytes);
    _tile_stored(2, result + 32, bytes);
    _tile_stored(3, result + 48, bytes);
  }

  // Elements d to d + 63 of 32 keys, in pairs of keys; within 32 elements in the order of PairDots.
  void interleave(const bf16* const* rows, int64_t d) {
    uint32_t* to = pairs_;
    for (int64_t k = 0; k < 32; k += 2, to += kPart) {
      KUNLUN_UNROLL
      for (int64_t part = 0; part < kPart; part += 32) {
        const int64_t left = size_ - d - part;
        const __m512i even = PairDots::load_part(rows[k] + d + part, left);
        const __m512i odd = PairDots::load_part(rows[k + 1] + d + part, left);
        _mm512_store_si512(to + part, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + part + 16, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  TileState state_;
  int64_t size_, rows_, stride_;
  alignas(64) float square_[16 * 16];
  alignas(64) uint32_t pairs_[16 * kPart];
};

}  // namespace kunlun::amx
