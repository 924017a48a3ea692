#include "kernels/rotary.h"

#include <cmath>
#include <cstring>

#include "core/shuffle.h"
#include "core/thread_pool.h"
#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// The cosines and sines of one token in float32.
class AngleRow {
 public:
  AngleRow(const RotaryAngles& angles, int64_t token) : half(angles.rotary_dim / 2) {
    const int64_t offset = angles.positions[token] * angles.cache_stride;
    if (angles.cache_dtype == DType::kFloat32) {
      cos = static_cast<const float*>(angles.cache) + offset;
    } else {
      KUNLUN_DISPATCH_DTYPE(angles.cache_dtype, C, widen(static_cast<const C*>(angles.cache) + offset));
      cos = buffer_;
    }
    sin = cos + half;
  }

  AngleRow(const AngleRow&) = delete;

  const float* cos;
  const float* sin;
  const int64_t half;

 private:
  template <typename C>
  void widen(const C* row) {
    int64_t i = 0;
    for (; i + kLanes <= 2 * half; i += kLanes) store(buffer_ + i, load(row + i));
    for (; i < 2 * half; ++i) buffer_[i] = to_float(row[i]);
  }

  float buffer_[kMaxHeadSize];
};

// Where the elements of a head come from: as they are, or normalised.
template <typename T>
struct Plain {
  const T* x;
  Vec vec(int64_t i) const { return load(x + i); }
  float scalar(int64_t i) const { return to_float(x[i]); }
};

template <typename T>
struct Normed {
  const T* x;
  const float* weight;
  float scale;
  Vec vec(int64_t i) const { return load(x + i) * scale * load(weight + i); }
  float scalar(int64_t i) const { return to_float(x[i]) * scale * weight[i]; }
};

template <typename T, typename Source>
void rotate_halves(T* out, const Source& in, const AngleRow& a) {
  int64_t i = 0;
  for (; i + kLanes <= a.half; i += kLanes) {
    const Vec x = in.vec(i), y = in.vec(a.half + i), cos = load(a.cos + i), sin = load(a.sin + i);
    store(out + i, x * cos - y * sin);
    store(out + a.half + i, y * cos + x * sin);
  }
  for (; i < a.half; ++i) {
    const float x = in.scalar(i), y = in.scalar(a.half + i);
    out[i] = from_float<T>(x * a.cos[i] - y * a.sin[i]);
    out[a.half + i] = from_float<T>(y * a.cos[i] + x * a.sin[i]);
  }
}

template <typename T, typename Source>
void rotate_pairs(T* out, const Source& in, const AngleRow& a) {
  int64_t i = 0;
  for (; i + kLanes <= a.half; i += kLanes) {
    const VecPair v = deinterleave(in.vec(2 * i), in.vec(2 * i + kLanes));
    const Vec cos = load(a.cos + i), sin = load(a.sin + i);
    const VecPair r = interleave(v.first * cos - v.second * sin, v.second * cos + v.first * sin);
    store(out + 2 * i, r.first);
    store(out + 2 * i + kLanes, r.second);
  }
  for (; i < a.half; ++i) {
    const float x = in.scalar(2 * i), y = in.scalar(2 * i + 1);
    out[2 * i] = from_float<T>(x * a.cos[i] - y * a.sin[i]);
    out[2 * i + 1] = from_float<T>(y * a.cos[i] + x * a.sin[i]);
  }
}

template <typename T, typename Source>
void rotate_head(T* out, const Source& in, const AngleRow& angles, bool is_neox) {
  if (is_neox) {
    rotate_halves(out, in, angles);
  } else {
    rotate_pairs(out, in, angles);
  }
}

template <typename T, typename Source>
void copy_elements(T* out, const Source& in, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) store(out + i, in.vec(i));
  for (; i < end; ++i) out[i] = from_float<T>(in.scalar(i));
}

template <typename T>
T* head_at(const HeadView& view, int64_t token, int64_t head) {
  return static_cast<T*>(view.data) + token * view.token_stride + head * view.head_stride;
}

template <typename T>
void rotate_in_place(const HeadView& view, int64_t token, const AngleRow& angles, bool is_neox) {
  for (int64_t head = 0; head < view.num_heads; ++head) {
    T* x = head_at<T>(view, token, head);
    rotate_head(x, Plain<T>{x}, angles, is_neox);
  }
}

// Calls body(begin, end) on ranges of tokens, in parallel.
template <typename Body>
void for_tokens(int64_t tokens, int64_t elements_per_token, Body&& body) {
  parallel_ranges(tokens, kElementsPerTask / (elements_per_token + 1) + 1, body);
}

void rotary_embedding(const RotaryArgs& a) {
  const int64_t width = (a.query.num_heads + a.key.num_heads) * a.head_size;
  for_tokens(a.tokens, width, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const AngleRow angles(a.angles, token);
      KUNLUN_DISPATCH_DTYPE(a.dtype, T, {
        rotate_in_place<T>(a.query, token, angles, a.angles.is_neox);
        rotate_in_place<T>(a.key, token, angles, a.angles.is_neox);
      });
    }
  });
}

// A norm's weight, with the offset added, in float32.
struct NormWeight {
  NormWeight(const HeadNorm& norm, float offset, int64_t head_size) : present(norm.weight != nullptr) {
    if (!present) return;
    KUNLUN_DISPATCH_DTYPE(norm.weight_dtype, W, {
      const W* weight = static_cast<const W*>(norm.weight);
      for (int64_t i = 0; i < head_size; ++i) values[i] = to_float(weight[i]) + offset;
    });
  }

  const bool present;
  float values[kMaxHeadSize];
};

template <typename T>
float inverse_rms(const T* x, int64_t n, float epsilon) {
  Vec sum{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    sum = fma(v, v, sum);
  }
  float total = reduce_add(sum);
  for (; i < n; ++i) total += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(total / static_cast<float>(n) + epsilon);
}

template <typename T, typename Source>
void write_head(T* out, const Source& in, const SplitNormRopeArgs& a, const AngleRow& angles) {
  rotate_head(out, in, angles, a.angles.is_neox);
  copy_elements(out, in, a.angles.rotary_dim, a.head_size);
}

template <typename T>
void write_heads(const HeadView& out, const T* in, int64_t token, const SplitNormRopeArgs& a, const NormWeight& weight,
                 const AngleRow& angles) {
  for (int64_t head = 0; head < out.num_heads; ++head, in += a.head_size) {
    T* to = head_at<T>(out, token, head);
    if (weight.present) {
      write_head(to, Normed<T>{in, weight.values, inverse_rms(in, a.head_size, a.epsilon)}, a, angles);
    } else {
      write_head(to, Plain<T>{in}, a, angles);
    }
  }
}

template <typename T>
void copy_heads(const HeadView& out, const T* in, int64_t token, int64_t head_size) {
  for (int64_t head = 0; head < out.num_heads; ++head, in += head_size) {
    std::memcpy(head_at<T>(out, token, head), in, static_cast<size_t>(head_size) * sizeof(T));
  }
}

template <typename T>
void split_norm_rope_tokens(const SplitNormRopeArgs& a, int64_t begin, int64_t end) {
  const NormWeight query_weight(a.query_norm, a.weight_offset, a.head_size);
  const NormWeight key_weight(a.key_norm, a.weight_offset, a.head_size);
  for (int64_t token = begin; token < end; ++token) {
    const AngleRow angles(a.angles, token);
    const T* query = static_cast<const T*>(a.qkv) + token * a.qkv_stride;
    const T* key = query + a.query.num_heads * a.head_size;
    write_heads(a.query, query, token, a, query_weight, angles);
    write_heads(a.key, key, token, a, key_weight, angles);
    copy_heads(a.value, key + a.key.num_heads * a.head_size, token, a.head_size);
  }
}

void split_norm_rope(const SplitNormRopeArgs& a) {
  const int64_t width = (a.query.num_heads + 2 * a.key.num_heads) * a.head_size;
  for_tokens(a.tokens, width, [&](int64_t begin, int64_t end) {
    KUNLUN_DISPATCH_DTYPE(a.dtype, T, split_norm_rope_tokens<T>(a, begin, end));
  });
}

}  // namespace

const RotaryKernels rotary_kernels = {rotary_embedding, split_norm_rope};

}  // namespace kunlun::KUNLUN_ISA
