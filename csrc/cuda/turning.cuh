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

// Cosines and sines of `each` pairs. They are asked for before a sum is taken, and looked at
// after it.
template <class T, bool own_type>
struct Turns {
  static constexpr int each = kLanes<T>;
  uint4 raw[2];
  const void* cache;
  int64_t at, half;

  // Of the pairs from `first` on; NaN, in any type, for position -1.
  __device__ __forceinline__ Turns(const Angles& a, int64_t position, int first, int half)
      : cache(position < 0 ? nullptr : a.cache),
        at(position * a.cache_stride + first),
        half(half) {
    raw[0] = raw[1] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (own_type && position >= 0) {
      raw[0] = load(static_cast<const T*>(a.cache) + at);
      raw[1] = load(static_cast<const T*>(a.cache) + at + half);
    }
  }

  __device__ __forceinline__ void look(const Angles& a, float (&cosines)[each],
                                       float (&sines)[each]) const {
    unpack<T>(raw[0], cosines);
    unpack<T>(raw[1], sines);
    if (!own_type && cache != nullptr) {
      read_all(a.cache_type, cache, at, cosines);
      read_all(a.cache_type, cache, at + half, sines);
    }
  }
};

struct Pair {
  float low, high;
};

// Explicit operations: what a compiler would contract could differ between kernels.
__device__ __forceinline__ Pair turned(float low, float high, float cosine, float sine) {
  return {fmaf(low, cosine, -__fmul_rn(high, sine)), fmaf(high, cosine, __fmul_rn(low, sine))};
}

// Two vectors of a unit.
template <bool is_neox, int each>
__device__ __forceinline__ void turn(float (&a)[each], float (&b)[each],
                                     const float (&cosines)[each], const float (&sines)[each]) {
  if constexpr (is_neox) {
#pragma unroll
    for (int e = 0; e < each; e++) {
      const Pair p = turned(a[e], b[e], cosines[e], sines[e]);
      a[e] = p.low;
      b[e] = p.high;
    }
  } else {
#pragma unroll
    for (int e = 0; e < each; e += 2) {
      Pair p = turned(a[e], a[e + 1], cosines[e / 2], sines[e / 2]);
      a[e] = p.low;
      a[e + 1] = p.high;
      p = turned(b[e], b[e + 1], cosines[(each + e) / 2], sines[(each + e) / 2]);
      b[e] = p.low;
      b[e + 1] = p.high;
    }
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
