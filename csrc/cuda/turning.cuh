// SPDX-License-Identifier: Apache-2.0
// Turning pairs of elements by a position's angles, for the kernels that do.
//
// Work is cut into units: `each` pairs, which are two vectors. In the neox style these are
// elements i of the first and of the second half, in gptj's they are neighbours.
#pragma once

#include "kernels.h"
#include "tuning.h"

namespace vllm_fl {
namespace {

// The position of a token, or -1 where it is not within the cache. It is read once, and what is
// checked is what is used.
__device__ __forceinline__ int64_t position_of(const Angles& a, int64_t token) {
  const int64_t position = a.positions_are_64_bit
                               ? static_cast<const int64_t*>(a.positions)[token]
                               : static_cast<const int32_t*>(a.positions)[token];
  return position >= 0 && position < a.cache_rows ? position : -1;
}

// Cosines and sines of a unit, as T holds them. They are asked for before a sum is taken, and
// looked at after it.
template <class T, bool own_type>
struct Turns {
  static constexpr int each = kLanes<T>;
  uint4 raw[2];
  const void* cache;
  int64_t at;

  // Of the pairs from `first` on; NaN, in any type, for position -1.
  __device__ __forceinline__ Turns(const Angles& a, int64_t position, int first, int half)
      : cache(position < 0 ? nullptr : a.cache), at(position * a.cache_stride + first) {
    raw[0] = raw[1] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (own_type && position >= 0) {
      raw[0] = load(static_cast<const T*>(a.cache) + at);
      raw[1] = load(static_cast<const T*>(a.cache) + at + half);
    }
  }

  __device__ __forceinline__ void look(const Angles& a, int half, uint4& cosines,
                                       uint4& sines) const {
    cosines = raw[0];
    sines = raw[1];
    if (!own_type && cache != nullptr) {
      float x[each];
      read_all(a.cache_type, cache, at, x);
      cosines = packed<T>(x);
      read_all(a.cache_type, cache, at + half, x);
      sines = packed<T>(x);
    }
  }
};

struct Pair {
  float low, high;
};

// One pair, in float32; the caller rounds. Explicit operations: a compiler may contract others, and
// not in each kernel alike.
__device__ __forceinline__ Pair turned(float low, float high, float cosine, float sine) {
  return {fmaf(low, cosine, -__fmul_rn(high, sine)),
          fmaf(high, cosine, __fmul_rn(low, sine))};
}

// The two vectors of a unit. The angles are those that T holds, as in the reference.
template <class T, bool is_neox>
__device__ __forceinline__ void turn(float (&a)[kLanes<T>], float (&b)[kLanes<T>], uint4 cosines,
                                     uint4 sines) {
  constexpr int each = kLanes<T>;
  float cosine[each], sine[each];
  unpack<T>(cosines, cosine);
  unpack<T>(sines, sine);
#pragma unroll
  for (int e = 0; e < each; e++) {
    constexpr int pairs = each / 2;  // neighbours in a vector
    float& low = is_neox ? a[e] : e < pairs ? a[2 * e] : b[2 * (e - pairs)];
    float& high = is_neox ? b[e] : e < pairs ? a[2 * e + 1] : b[2 * (e - pairs) + 1];
    const Pair p = turned(low, high, cosine[e], sine[e]);
    low = p.low;
    high = p.high;
  }
}

// Where in a head the two vectors of a unit begin.
template <bool is_neox>
__device__ __forceinline__ int first_of(int unit, int each) {
  return is_neox ? unit * each : 2 * unit * each;
}
template <bool is_neox>
__device__ __forceinline__ int second_of(int unit, int each, int half) {
  return is_neox ? half + unit * each : (2 * unit + 1) * each;
}

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline bool angles_are_aligned(const Angles& a, int half, int lanes) {
  return is_aligned(a.cache) && a.cache_stride % lanes == 0 && half % lanes == 0;
}

}  // namespace
}  // namespace vllm_fl
