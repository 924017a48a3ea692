// Operands of a product in the form that AMX tiles are loaded from.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/scratch.h"
#include "core/thread_pool.h"
#include "core/transpose.h"
#include "core/vec.h"
#include "kernels/linear.h"

namespace kunlun::amx {

constexpr int64_t kTile = 16;      // rows of a tile, and tokens
constexpr int64_t kFeatures = 32;  // of a tile

// The packed tokens: tile t, step k is 16 rows (pairs of features) of `width` tokens.
struct Packed {
  const char* data;
  int64_t steps, width;

  int64_t step_bytes() const { return width * 64; }
  int64_t tile_bytes() const { return steps * step_bytes(); }
  const char* tile(int64_t t) const { return data + t * tile_bytes(); }
};

// Rows of weights; the stride is in bytes.
struct Weights {
  const char* data;
  int64_t stride;
};

inline const char* weight_row(const LinearArgs& a, int64_t row) {
  return reinterpret_cast<const char*>(static_cast<const bf16*>(a.weight) + row * a.weight_stride);
}

// Writes the 16 pairs of features of one step for `width` tokens, whose rows are `stride` bytes apart.
inline void pack_step(const char* rows, int64_t stride, char* to, int64_t width) {
  const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1u);
  for (int quad = 0; quad < 4; ++quad) {
    Vec column[4];
    transpose_quad(rows + 16 * quad, stride, column);
    for (int c = 0; c < 4; ++c) _mm512_mask_storeu_ps(to + (4 * quad + c) * width * 4, mask, column[c]);
  }
}

// The same where tokens or features end within the tile: what lies beyond them is zero.
inline void pack_edge(const char* rows, int64_t stride, int64_t tokens, int64_t features, char* to, int64_t width) {
  alignas(64) char copy[kTile * 64] = {};
  for (int64_t t = 0; t < tokens; ++t) std::memcpy(copy + t * 64, rows + t * stride, static_cast<size_t>(features) * 2);
  pack_step(copy, 64, to, width);
}

inline void pack_tile(const LinearArgs& a, int64_t token, char* to, const Packed& p) {
  const char* rows = reinterpret_cast<const char*>(static_cast<const bf16*>(a.input) + token * a.input_stride);
  const int64_t stride = a.input_stride * 2;
  const int64_t tokens = std::min(kTile, a.tokens - token);
  for (int64_t step = 0; step < p.steps; ++step, to += p.step_bytes(), rows += 64) {
    const int64_t features = std::min(kFeatures, a.features - step * kFeatures);
    if (tokens == kTile && features == kFeatures) {
      pack_step(rows, stride, to, kTile);
    } else {
      pack_edge(rows, stride, tokens, features, to, p.width);
    }
  }
}

// Packs all tokens, into memory that lives until the calling thread's next call.
inline Packed pack(const LinearArgs& a) {
  thread_local Scratch scratch;
  const int64_t tiles = (a.tokens + kTile - 1) / kTile;
  Packed p{nullptr, (a.features + kFeatures - 1) / kFeatures, std::min(kTile, a.tokens)};
  char* data = static_cast<char*>(scratch.reserve(static_cast<size_t>(tiles * p.tile_bytes())));
  p.data = data;
  const auto body = [&](int64_t t) { pack_tile(a, t * kTile, data + t * p.tile_bytes(), p); };
  if (tiles <= 2) {
    for (int64_t t = 0; t < tiles; ++t) body(t);
  } else {
    parallel_for(tiles, body);
  }
  return p;
}

// `count` rows from `row` on; a copy filled up with zeros where the matrix or the last step ends within them.
inline Weights weights_at(const LinearArgs& a, int64_t row, int64_t count, int64_t steps) {
  if (row + count <= a.rows && a.features % kFeatures == 0) return {weight_row(a, row), a.weight_stride * 2};
  thread_local Scratch scratch;
  const int64_t stride = steps * 64;
  char* copy = static_cast<char*>(scratch.reserve(static_cast<size_t>(count * stride)));
  std::memset(copy, 0, static_cast<size_t>(count * stride));
  for (int64_t r = 0; r < std::min(count, a.rows - row); ++r) {
    std::memcpy(copy + r * stride, weight_row(a, row + r), static_cast<size_t>(a.features) * 2);
  }
  return {copy, stride};
}

}  // namespace kunlun::amx
