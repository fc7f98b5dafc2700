// SPDX-License-Identifier: Apache-2.0
// One vector of floats, as wide as the instruction set of the file that includes this, and what
// the kernels do with it: compiler vectors, which are SSE2 and NEON too, and intrinsics of AVX2
// and AVX-512 where compilers are three times slower without (GCC 12: changing widths).
//
// Everything is in an anonymous namespace and nothing of the standard library is used: an inline
// function that two files share could be linked in the version of the wider one, and end the
// process on a CPU that lacks those instructions.
#pragma once

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VLLM_FL_LANES 16
#elif defined(__AVX2__)
#define VLLM_FL_LANES 8
#else
#define VLLM_FL_LANES 4
#endif

namespace {

constexpr int kLanes = VLLM_FL_LANES;

typedef float Floats __attribute__((vector_size(4 * VLLM_FL_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * VLLM_FL_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * VLLM_FL_LANES)));
typedef uint64_t Pairs __attribute__((vector_size(4 * VLLM_FL_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * VLLM_FL_LANES)));
typedef uint32_t HalfWords __attribute__((vector_size(2 * VLLM_FL_LANES)));

// What a tensor holds; only the bits, never arithmetic.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline Floats all(float value) {
  return value - Floats{};  // x - 0 keeps the sign of zero
}

template <class V, class T>
inline V read(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class T, class V>
inline void write(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// ------------------------------------------------------------------------- loading, storing

inline Floats load(const float* from) { return read<Floats>(from); }

// 16-bit lanes to 32-bit ones, and back where the upper half is zero.
inline Words widened(Halves h) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, Words);
#endif
}

inline Halves narrowed(Words w) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)w);
#elif defined(__AVX2__)
  __m256i i = (__m256i)w;
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
#else
  return __builtin_convertvector(w, Halves);
#endif
}

inline Floats load(const BFloat16* from) {
  return bits_of<Floats>(widened(read<Halves>(from)) << 16);
}

inline void store(float* to, Floats v) { write(to, v); }

inline void store(BFloat16* to, Floats v) {
  Words u = bits_of<Words>(v);
  Words nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // ties to even
  write(to, narrowed(v == v ? nearest : Words{} + 0x7fc0u));
}

#if defined(__AVX2__)

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#else
  return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#endif
}

inline void store(Float16* to, Floats v) {
#if defined(__AVX512F__)
  write(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  write(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
}

#else

inline Floats load(const Float16* from) {
  // With the exponent in place it is too small by 2^112, subnormals included.
  Words h = widened(read<Halves>(from));
  Floats size = bits_of<Floats>((h & 0x7fffu) << 13) * 0x1p112f;
  Words special = (Words)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return bits_of<Floats>(bits_of<Words>(size) | special | (h & 0x8000u) << 16);
}

inline void store(Float16* to, Floats v) {
  // Scaled by 2^-112, float's subnormals are float16's; the mantissa is cut as bfloat16's is.
  Words u = bits_of<Words>(v);
  Words s = bits_of<Words>(bits_of<Floats>(u & 0x7fffffffu) * 0x1p-112f);
  s = (s + 0xfffu + ((s >> 13) & 1u)) >> 13;
  s = s > 0x7c00u ? Words{} + 0x7c00u : s;
  s = v == v ? s : Words{} + 0x7e00u;
  write(to, narrowed(s | ((u >> 16) & 0x8000u)));
}

#endif

// The value that is left in T.
template <class T>
inline Floats rounded(Floats v) {
  T kept[kLanes];
  store(kept, v);
  return load(kept);
}

template <>
inline Floats rounded<float>(Floats v) {
  return v;
}

template <>
inline Floats rounded<BFloat16>(Floats v) {
  Words u = bits_of<Words>(v);
  Floats nearest = bits_of<Floats>((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
  return v == v ? nearest : v;
}

#if defined(__AVX512F__)
template <>
inline Floats rounded<Float16>(Floats v) {
  return (Floats)_mm512_cvtph_ps(
      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
template <>
inline Floats rounded<Float16>(Floats v) {
  return (Floats)_mm256_cvtph_ps(
      _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

// How many elements of a vector there are: all, or a number of them.
struct Full {};

template <class T>
inline Floats load(const T* from, Full) {
  return load(from);
}

template <class T>
inline void store(T* to, Floats v, Full) {
  store(to, v);
}

// The first `count` elements, zero behind them.
template <class T>
inline Floats load(const T* from, int64_t count) {
  T padded[kLanes] = {};
  __builtin_memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
inline void store(T* to, Floats v, int64_t count) {
  T padded[kLanes];
  store(padded, v);
  __builtin_memcpy(to, padded, count * sizeof(T));
}

// step(i, count) for every vector of n elements; count is Full{} but for what is left at the end.
template <class Step>
inline __attribute__((always_inline)) void for_vectors(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, Full{});
  if (i < n) step(i, n - i);
}

// ------------------------------------------------------------------------------ arithmetic

inline float sum(Floats v) {
  float lanes[kLanes];
  write(lanes, v);
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Neighbouring lanes change places.
inline Floats swapped(Floats v) {
  Pairs p = bits_of<Pairs>(v);
  return bits_of<Floats>((p << 32) | (p >> 32));
}

// The first half of the lanes, each twice.
inline Floats doubled(Floats v) {
  HalfWords first;
  __builtin_memcpy(&first, &v, sizeof first);
  Pairs p = __builtin_convertvector(first, Pairs);
  return bits_of<Floats>(p | (p << 32));
}

// The sign of every other lane flipped, that of the first too.
inline Floats alternating(Floats v) {
  return bits_of<Floats>(bits_of<Pairs>(v) ^ (uint64_t)0x80000000u);
}

// v * 2^n for whole n from -160 to 0, rounded once where that is subnormal.
inline Floats scaled(Floats v, Floats n) {
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  Ints whole = __builtin_convertvector(n, Ints);
  Ints first = whole >> 1;
  return v * bits_of<Floats>((first + 127) << 23) * bits_of<Floats>((whole - first + 127) << 23);
#endif
}

// exp(t) = mantissa * 2^exponent.
struct Exponential {
  Floats mantissa;
  Floats exponent;  // whole
};

// For t from kSmallest to 0. What is left of t after whole powers of two is within ln(2) / 2,
// where this polynomial, fitted to the least relative error, is good to 2^-28.
constexpr float kSmallest = -110.0f;

inline Exponential exponential(Floats t) {
  const float round = 0x1.8p23f;  // what is added to it is rounded to whole numbers
  Floats n = t * 0x1.715476p0f + round - round;
  Floats r = (t - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln(2) in two parts
  Floats p = all(0x1.6a23cep-10f);
  p = p * r + 0x1.123a2p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return {p, n};
}

// x / (1 + exp(-s)), right where exp(-s) overflows and where the result is subnormal.
inline Floats times_sigmoid(Floats x, Floats s) {
  Ints negative = s < 0.0f;
  Floats t = negative ? s : -s;
  t = t > kSmallest ? t : all(kSmallest);
  Exponential e = exponential(t);
  // exp(s) / (1 + exp(s)) for a negative s; its power of two comes last.
  Floats r = x * (negative ? e.mantissa : all(1.0f)) / (1.0f + scaled(e.mantissa, e.exponent));
  r = scaled(r, negative ? e.exponent : Floats{});
  return s < kSmallest ? x * 0.0f : r;  // not a number where x is infinite
}

struct Silu {
  static Floats gate(Floats x) { return times_sigmoid(x, x); }
};

struct GeluTanh {  // (1 + tanh(u)) / 2 is the sigmoid of 2 * u
  static Floats gate(Floats x) {
    Floats u = x * (1.0f + x * x * 0.044715f);
    return times_sigmoid(x, u * 0x1.988454p0f);  // 2 * sqrt(2 / pi)
  }
};

// x * P(X <= x) for a standard normal X. P(X >= a) = exp(-a^2 / 2) * t * q(t) for a >= 0 and
// t = 1 / (1 + 0.35 * a); q fitted to the least relative error, 2^-24.9 for a up to 15.
struct GeluErf {
  static Floats gate(Floats x) {
    Ints negative = x < 0.0f;
    Floats a = negative ? -x : x;
    Floats t = 1.0f / (1.0f + 0.35f * a);
    Floats q = all(-0.029164113104343414f);
    q = q * t + 0.14406169950962067f;
    q = q * t - 0.2559036612510681f;
    q = q * t + 0.15939489006996155f;
    q = q * t - 0.023265143856406212f;
    q = q * t + 0.105575330555439f;
    q = q * t + 0.11981537193059921f;
    q = q * t + 0.13986435532569885f;
    q = q * t + 0.13962125778198242f;
    Floats half_square = x * x * -0.5f;
    half_square = half_square > kSmallest ? half_square : all(kSmallest);
    Exponential e = exponential(half_square);
    Floats beyond = t * q * scaled(e.mantissa, e.exponent);
    return x * (negative ? beyond : 1.0f - beyond);
  }
};

}  // namespace
