// float32 SIMD vector of the instruction set this file is compiled for, with loads and stores from bf16, fp16 and fp32.
// Everything lives in the namespace KUNLUN_ISA, so that one source gives one set of symbols per instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef KUNLUN_ISA
#error "KUNLUN_ISA must name the instruction set's namespace"
#endif

namespace kunlun {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

namespace KUNLUN_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2), aligned(2)));

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float to_float(fp16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

template <typename T>
inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// Round to nearest even; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline fp16 from_float<fp16>(float x) {
#if defined(__F16C__)
  return fp16{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(x);
  if (x != x) return fp16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 65520.0f) return fp16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x1p-14f)
    return fp16{static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)))};
  bits &= 0x7fffffffu;
  bits += 0xfffu + ((bits >> 13) & 1u);
  return fp16{static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13))};
#endif
}

inline Vec broadcast(float x) { return x - Vec{}; }

// memcpy of a 32-byte vector would be copied in halves through the stack.
inline Vec load(const float* p) {
#if defined(__AVX512F__)
  return _mm512_loadu_ps(p);
#elif defined(__AVX2__)
  return _mm256_loadu_ps(p);
#else
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
#endif
}

inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif defined(__AVX2__)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
  HVec h;
  std::memcpy(&h, p, sizeof(h));
  return reinterpret_cast<Vec>(__builtin_convertvector(h, UVec) << 16);
#endif
}

inline Vec load(const fp16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(p, v);
#elif defined(__AVX2__)
  _mm256_storeu_ps(p, v);
#else
  std::memcpy(p, &v, sizeof(v));
#endif
}

inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh(v);
  std::memcpy(p, &h, sizeof(h));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<bf16>(v[i]);
#endif
}

inline void store(fp16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<fp16>(v[i]);
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline float reduce_add(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

inline float reduce_max(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// Both return b where a or b is NaN.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// 1 / x to within an ulp or two, for x from 1 up; 0 where that is below 2^-126.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec r = _mm512_rcp14_ps(x);
  return fma(r, 1.0f - x * r, r);
#else
  return 1.0f / x;
#endif
}

// exp(x) with a relative error below 2e-7: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2] (Cephes coefficients).
// Arguments are clamped to [-87.3, 88.3], so exp(-inf) is about 1e-38, not 0: mask where an exact 0 matters.
inline Vec exp(Vec x) {
  x = min(max(x, broadcast(-87.33654f)), broadcast(88.3f));
  const Vec scaled = x * 1.44269504f;
  const Vec rounded = (scaled + 12582912.0f) - 12582912.0f;
  Vec r = fma(rounded, broadcast(-0.693359375f), x);
  r = fma(rounded, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const IVec power = (__builtin_convertvector(rounded, IVec) + 127) << 23;
  return p * reinterpret_cast<Vec>(power);
}

inline Vec sigmoid(Vec x) { return reciprocal(1.0f + exp(-x)); }

// Loads n < kLanes elements, the others are `fill`.
template <typename T>
inline Vec load_partial(const T* p, int n, float fill = 0.0f) {
  Vec v = broadcast(fill);
  for (int i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}

template <typename T>
inline void store_partial(T* p, Vec v, int n) {
  for (int i = 0; i < n; ++i) p[i] = from_float<T>(v[i]);
}

}  // namespace KUNLUN_ISA
}  // namespace kunlun
