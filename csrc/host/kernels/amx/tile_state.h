// The tiles' shape while attention runs.
#pragma once

#include "kernels/amx/tiles.h"

namespace kunlun::amx {

// Tiles of 64 bytes a row: those below `split` have `few` rows, the others 16. Until the object goes.
class TileState {
 public:
  explicit TileState(int few = 16, int split = 0) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.column_bytes[i] = 64;
      config.rows[i] = static_cast<uint8_t>(i < split ? few : 16);
    }
    _tile_loadconfig(&config);
  }
  ~TileState() { _tile_release(); }
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
};

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace kunlun::amx
