// SPDX-License-Identifier: Apache-2.0
// Where the rows of a tensor lie, for kernels of any device.
#pragma once

#include <stdint.h>

// These functions are never called: see cpu/vec.h on functions that two files share.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define VLLM_FL_INLINE __host__ __device__ __forceinline__
#else
#define VLLM_FL_INLINE __attribute__((always_inline)) inline
#endif

namespace vllm_fl {

constexpr int kMaxDims = 6;

// Rows of a tensor, numbered as if it were contiguous. Strides are in elements.
struct Rows {
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  VLLM_FL_INLINE int64_t offset(int64_t row) const {
    if (dims == 1) return row * strides[0];
    int64_t at = 0;
    for (int d = dims - 1; d >= 0; d--) {
      at += row % sizes[d] * strides[d];
      row /= sizes[d];
    }
    return at;
  }
};

enum Type { kFloat32, kBFloat16, kFloat16, kTypes };

}  // namespace vllm_fl
