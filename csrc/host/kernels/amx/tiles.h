// The shape of the AMX tiles, which is a thread's state that all kernels share.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kunlun::amx {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Eight tiles of 16 rows. Tiles 4 and 5 have 64 bytes a row, the others `columns` times 4 bytes, 1 to 16. Every task
// that uses tiles calls it: another kernel may have set another shape on this thread, and it costs less than a
// microsecond.
inline void configure_tiles(int64_t columns) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.column_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 64 : 4 * columns);
  }
  _tile_loadconfig(&config);
}

}  // namespace kunlun::amx
