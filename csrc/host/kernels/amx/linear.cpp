// Products on AMX tiles. A tile of weights is 16 rows as they lie in memory; the tokens are packed once per call, pairs
// of features side by side. A tile sum runs over the features in order, 32 at a time, whatever the number of tokens: a
// token's result does not depend on the batch it is in.
#include "kernels/linear.h"

#include <algorithm>

#include "kernels/amx/linear_pack.h"
#include "kernels/amx/linear_store.h"
#include "kernels/amx/tiles.h"
#include "kernels/linear_plan.h"

namespace kunlun::amx {
namespace {

constexpr int64_t kBlock = 2 * kTile;  // weight rows taken at once, and tokens
constexpr int64_t kTokenBytes = 1 << 20;

// Up to this many steps, 32 rows of weights stay in the first-level cache (48 KiB) if the tokens are kept from driving
// them out.
constexpr int64_t kStepsInCache = 24;

// The weights that are needed next come from memory meanwhile, a few cache lines per step.
struct Prefetch {
  const char* line;
  const char* end;
  int64_t lines;  // per step

  void step() {
    if (line >= end) return;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(line + i * 64, 0, 2);
    line += lines * 64;
  }
};

// Two tiles of weights or tokens: the first one at step 0, the way to the second one, to the next step, to a tile's
// next row. All in bytes.
struct Operand {
  const char* data;
  int64_t second, step, row;
};

// Loads tile 6, or the second tile, 7.
template <bool kHint>
void load_tokens(const Operand& x, bool second) {
  if (second && kHint) {
    _tile_stream_loadd(7, x.data + x.second, x.row);
  } else if (second) {
    _tile_loadd(7, x.data + x.second, x.row);
  } else if (kHint) {
    _tile_stream_loadd(6, x.data, x.row);
  } else {
    _tile_loadd(6, x.data, x.row);
  }
}

// Sums of 32 rows and `Tiles` tiles of tokens, in tiles 0 to 3; 4 and 5 hold weights, 6 and 7 tokens. Meanwhile the
// block before is written out and this block's part of the output is brought to the cache; with kHint, the tokens are
// read without driving out the weights.
template <int Tiles, bool kHint, typename Out>
void multiply_steps(Operand w, Operand x, int64_t steps, PendingStore<Out>& before, PendingStore<Out>& after,
                    Prefetch& next) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, w.data += w.step, x.data += x.step) {
    next.step();
    _tile_loadd(4, w.data, w.row);
    load_tokens<kHint>(x, false);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tiles == 2) {
      load_tokens<kHint>(x, true);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, w.data + w.second, w.row);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
    before.advance();
    after.prefetch(step);
  }
}

template <int Tiles>
void store_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + Tiles * kTileSums, 64);
  if constexpr (Tiles == 2) {
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(3, sums + 3 * kTileSums, 64);
  }
}

template <typename Out>
class Task {
 public:
  Task(const LinearArgs& args, const Packed& packed) : a_(args), packed_(packed) {}

  void run(const LinearRange& range) {
    configure_tiles(packed_.width);
    for (int64_t row = range.row; row < range.row_end; row += kBlock) {
      rows(row, range.token / kTile, (range.token_end + kTile - 1) / kTile, std::min(row + kBlock, a_.rows - 1));
    }
    pending_.finish();
  }

 private:
  // 32 rows with all tokens of the task.
  void rows(int64_t row, int64_t tile, int64_t tile_end, int64_t next_row) {
    const Weights w = weights_at(a_, row, kBlock, packed_.steps);
    const int64_t blocks = (tile_end - tile + 1) / 2;
    const char* next = weight_row(a_, next_row);
    Prefetch prefetch{next, next + kBlock * packed_.steps * 64, (kBlock + blocks - 1) / blocks};
    for (; tile + 2 <= tile_end; tile += 2) block<2>(w, row, tile, prefetch);
    if (tile < tile_end) block<1>(w, row, tile, prefetch);
  }

  template <int Tiles>
  void block(const Weights& weights, int64_t row, int64_t tile, Prefetch& next) {
    const Operand w{weights.data, kTile * weights.stride, 64, weights.stride};
    const Operand x{packed_.tile(tile), packed_.tile_bytes(), packed_.step_bytes(), packed_.width * 4};
    PendingStore<Out> after(a_, sums_, row, tile * kTile, Tiles);
    if (packed_.steps <= kStepsInCache) {
      multiply_steps<Tiles, true>(w, x, packed_.steps, pending_, after, next);
    } else {
      multiply_steps<Tiles, false>(w, x, packed_.steps, pending_, after, next);
    }
    pending_.finish();
    store_sums<Tiles>(sums_);
    pending_ = after;
  }

  const LinearArgs& a_;
  const Packed& packed_;
  PendingStore<Out> pending_;
  alignas(64) float sums_[4 * kTileSums];
};

template <typename Out>
void multiply(const LinearArgs& a) {
  const Packed packed = pack(a);
  const LinearPlan plan = plan_linear(a, {kBlock, kBlock, sizeof(bf16), kTokenBytes});
  parallel_tasks(a, plan, [&](const LinearRange& range) { Task<Out>(a, packed).run(range); });
}

}  // namespace

void linear(const LinearArgs& a) {
  if (a.tokens == 0 || a.rows == 0) return;
  if (a.out_dtype == DType::kFloat32) {
    multiply<float>(a);
  } else {
    multiply<bf16>(a);
  }
}

}  // namespace kunlun::amx
