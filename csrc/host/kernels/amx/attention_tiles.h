// Attention by columns on the tile matrix unit, for bf16. See kernels/attention_tiles.h for the interface.
#pragma once

#include "kernels/amx/tile_state.h"
#include "kernels/attention_dots.h"
#include "kernels/attention_tiles.h"

namespace kunlun::amx {

// c[rows][columns] = (kAdd ? c : 0) + a · b with a: [rows][steps · 32] bf16, b: [steps · 16][kGroup] pairs of bf16;
// rows a multiple of 32 (the buffers are padded), one or two tiles of 16 columns.
template <bool kAdd, int kTiles>
inline void tile_product(const uint32_t* a, int64_t a_units, const uint32_t* b, float* c, int64_t rows, int64_t steps,
                         int64_t group) {
  const int64_t c_bytes = group * 4, a_bytes = a_units * 4;
  for (int64_t r = 0; r < rows; r += 32, a += 32 * a_units, c += 32 * group) {
    if constexpr (kAdd) {
      _tile_loadd(0, c, c_bytes);
      _tile_loadd(1, c + 16 * group, c_bytes);
      if constexpr (kTiles == 2) {
        _tile_loadd(2, c + 16, c_bytes);
        _tile_loadd(3, c + 16 * group + 16, c_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int64_t s = 0; s < steps; ++s) {
      _tile_loadd(4, a + s * 16, a_bytes);
      _tile_loadd(5, a + 16 * a_units + s * 16, a_bytes);
      _tile_loadd(6, b + s * 16 * group, c_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (kTiles == 2) {
        _tile_loadd(7, b + s * 16 * group + 16, c_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16 * group, c_bytes);
    if constexpr (kTiles == 2) {
      _tile_stored(2, c + 16, c_bytes);
      _tile_stored(3, c + 16 * group + 16, c_bytes);
    }
  }
}

// Keys as they are, [keys][head_size]; values transposed, [head_size][keys]; both padded with zeros to multiples of 32.
class AmxTiles {
 public:
  using Unit = uint32_t;
  static constexpr int kPerUnit = 2, kKeyStep = 32, kGroup = 32;

  explicit AmxTiles(int64_t head_size) : head_size_(head_size), padded_(round_up(head_size, 32)) {}
  int64_t query_units() const { return padded_ / 2; }
  int64_t result_rows() const { return padded_; }
  int64_t key_units() const { return kTileKeys * padded_ / 2; }
  int64_t value_units() const { return kTileKeys * padded_ / 2; }

  void query_row(uint32_t* to, const bf16* from) const {
    for (int64_t d = 0; d < padded_; d += 32) _mm512_storeu_si512(to + d / 2, load_part(from, d));
  }

  void pack_keys(uint32_t* to, const bf16* const* rows, int64_t n) const {
    for (int64_t k = 0; k < n; ++k) query_row(to + k * query_units(), rows[k]);
    const int64_t unused = (round_up(n, 32) - n) * query_units();
    std::memset(to + n * query_units(), 0, static_cast<size_t>(unused) * sizeof(Unit));
  }

  void pack_values(uint32_t* to, const bf16* const* rows, int64_t n) const {
    for (int64_t d = 0; d < padded_; d += 32) {
      for (int64_t k = 0; k < n; k += 32) transpose_square_of_32(to + d * kTileKeys / 2 + k / 2, rows + k, n - k, d);
    }
  }

  void logits(const uint32_t* keys, const uint32_t* query, float* to, int64_t n, int64_t vectors) const {
    const auto product = vectors == 1 ? tile_product<false, 1> : tile_product<false, 2>;
    product(keys, query_units(), query, to, round_up(n, 32), padded_ / 32, kGroup);
  }

  void add_values(const uint32_t* values, const uint32_t* weights, float* to, int64_t n, int64_t vectors) const {
    const auto product = vectors == 1 ? tile_product<true, 1> : tile_product<true, 2>;
    product(values, kTileKeys / 2, weights, to, padded_, round_up(n, 32) / 32, kGroup);
  }

 private:
  __m512i load_part(const bf16* row, int64_t d) const { return PairDots::load_part(row + d, head_size_ - d); }

  // Elements d to d + 31 of 32 keys, of which n are there, to 32 rows of keys.
  void transpose_square_of_32(uint32_t* to, const bf16* const* rows, int64_t n, int64_t d) const {
    Vec low[16], high[16];
    KUNLUN_UNROLL
    for (int64_t i = 0; i < 16; ++i) {
      const __m512i even = 2 * i < n ? load_part(rows[2 * i], d) : _mm512_setzero_si512();
      const __m512i odd = 2 * i + 1 < n ? load_part(rows[2 * i + 1], d) : _mm512_setzero_si512();
      low[i] = reinterpret_cast<Vec>(_mm512_unpacklo_epi16(even, odd));
      high[i] = reinterpret_cast<Vec>(_mm512_unpackhi_epi16(even, odd));
    }
    transpose_square(low);
    transpose_square(high);
    float* out = reinterpret_cast<float*>(to);
    KUNLUN_UNROLL
    for (int64_t i = 0; i < 16; ++i) {
      // Unpacking works within 128 bits: unit i of `low` is element i % 4 of the 8 in part i / 4.
      const int64_t element = i / 4 * 8 + i % 4;
      store(out + element * kTileKeys / 2, low[i]);
      store(out + (element + 4) * kTileKeys / 2, high[i]);
    }
  }

  TileState state_;
  int64_t head_size_, padded_;
};

}  // namespace kunlun::amx
