#include "kernels/activation.h"

#include <algorithm>

#include "core/shuffle.h"
#include "core/thread_pool.h"
#include "core/vec.h"

namespace kunlun::KUNLUN_ISA {
namespace {

constexpr int64_t kBlock = 2048;            // columns of one unit of work, a multiple of kLanes
constexpr int64_t kElementsPerTask = 4096;  // an exponential each: about 2 us

struct Silu {
  static Vec apply(Vec x) { return x * sigmoid(x); }
};

// x Phi(x). Phi's tail is erfc by formula 7.1.26 of Abramowitz and Stegun (1964), absolute error 1.5e-7.
struct Gelu {
  static Vec apply(Vec x) {
    const Vec z = max(x, -x) * 0.70710678f;
    const Vec t = 1.0f / (1.0f + z * 0.3275911f);
    Vec p = broadcast(1.061405429f);
    p = fma(p, t, broadcast(-1.453152027f));
    p = fma(p, t, broadcast(1.421413741f));
    p = fma(p, t, broadcast(-0.284496736f));
    p = fma(p, t, broadcast(0.254829592f));
    const Vec tail = 0.5f * p * t * exp(-z * z);
    return x * (x > 0.0f ? 1.0f - tail : tail);
  }
};

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).
struct GeluTanh {
  static Vec apply(Vec x) { return x * sigmoid(1.5957691216f * x * (1.0f + 0.044715f * x * x)); }
};

struct QuickGelu {
  static Vec apply(Vec x) { return x * sigmoid(1.702f * x); }
};

template <typename F, typename T>
void activate_block(T* out, const T* x, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(out + c, F::apply(load(x + c)));
  const int rest = static_cast<int>(n - c);
  if (rest != 0) store_partial(out + c, F::apply(load_partial(x + c, rest)), rest);
}

template <typename F, typename T>
void gate_block(T* out, const T* gate, const T* up, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store(out + c, F::apply(load(gate + c)) * load(up + c));
  const int rest = static_cast<int>(n - c);
  if (rest != 0) store_partial(out + c, F::apply(load_partial(gate + c, rest)) * load_partial(up + c, rest), rest);
}

// The limit comes first in max and min, which return their second argument when it is NaN.
inline Vec swiglu_oai_value(Vec gate, Vec up, float alpha, float limit) {
  gate = min(broadcast(limit), gate);
  up = max(broadcast(-limit), min(broadcast(limit), up));
  return (up + 1.0f) * gate * sigmoid(gate * alpha);
}

template <typename T>
void swiglu_oai_block(T* out, const T* x, int64_t n, float alpha, float limit) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    const VecPair pair = deinterleave(load(x + 2 * c), load(x + 2 * c + kLanes));
    store(out + c, swiglu_oai_value(pair.first, pair.second, alpha, limit));
  }
  for (; c < n; ++c) {
    const Vec gate = broadcast(to_float(x[2 * c])), up = broadcast(to_float(x[2 * c + 1]));
    out[c] = from_float<T>(swiglu_oai_value(gate, up, alpha, limit)[0]);
  }
}

// Calls body(row, begin, end) for column ranges that cover every row, in parallel.
template <typename Body>
void for_blocks(const ActivationArgs& a, Body&& body) {
  const int64_t blocks = (a.cols + kBlock - 1) / kBlock;
  const int64_t grain = kElementsPerTask / std::min(a.cols + 1, kBlock) + 1;
  parallel_ranges(a.rows * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * kBlock;
      body(i / blocks, first, std::min(a.cols, first + kBlock));
    }
  });
}

template <typename F, typename T>
void activate_rows(const ActivationArgs& a) {
  for_blocks(a, [&](int64_t row, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(a.input) + row * a.input_stride + begin;
    activate_block<F>(static_cast<T*>(a.out) + row * a.out_stride + begin, x, end - begin);
  });
}

template <typename F, typename T>
void gate_rows(const ActivationArgs& a) {
  for_blocks(a, [&](int64_t row, int64_t begin, int64_t end) {
    const T* gate = static_cast<const T*>(a.input) + row * a.input_stride + begin;
    gate_block<F>(static_cast<T*>(a.out) + row * a.out_stride + begin, gate, gate + a.cols, end - begin);
  });
}

template <typename F>
void activate_with(const ActivationArgs& a) {
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, activate_rows<F, T>(a));
}

template <typename F>
void gate_with(const ActivationArgs& a) {
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, gate_rows<F, T>(a));
}

void activate(const ActivationArgs& a) {
  switch (a.kind) {
    case Activation::kSilu:
      return activate_with<Silu>(a);
    case Activation::kGelu:
      return activate_with<Gelu>(a);
    case Activation::kGeluTanh:
      return activate_with<GeluTanh>(a);
    case Activation::kQuickGelu:
      return activate_with<QuickGelu>(a);
  }
}

void activate_and_mul(const ActivationArgs& a) {
  switch (a.kind) {
    case Activation::kSilu:
      return gate_with<Silu>(a);
    case Activation::kGelu:
      return gate_with<Gelu>(a);
    case Activation::kGeluTanh:
      return gate_with<GeluTanh>(a);
    case Activation::kQuickGelu:
      return gate_with<QuickGelu>(a);
  }
}

void swiglu_oai(const ActivationArgs& a) {
  KUNLUN_DISPATCH_DTYPE(a.dtype, T, for_blocks(a, [&](int64_t row, int64_t begin, int64_t end) {
                          const T* x = static_cast<const T*>(a.input) + row * a.input_stride + 2 * begin;
                          T* out = static_cast<T*>(a.out) + row * a.out_stride + begin;
                          swiglu_oai_block(out, x, end - begin, a.alpha, a.limit);
                        }));
}

}  // namespace

const ActivationKernels activation_kernels = {activate, activate_and_mul, swiglu_oai};

}  // namespace kunlun::KUNLUN_ISA
