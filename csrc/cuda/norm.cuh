// SPDX-License-Identifier: Apache-2.0
// RMS norms of rows, with and without the addition of a residual; one .cu file for each dtype
// instantiates `launch_norm_of`.
//
// A row is summed by a fixed set of threads in a fixed order (`NormShape`), whichever kernel it is
// that reads it: results do not depend on the number of rows, on addresses or on strides. What is
// computed in float32 is rounded where the reference in PyTorch rounds.
#pragma once

#include "kernels.h"
#include "tuning.h"

namespace vllm_fl {
namespace {

// Where a row lies. flat: the rows have one dimension, and 32 bits number the elements: addresses
// are a third of what a decode step executes otherwise.
template <bool flat>
struct RowAt {
  uint32_t outer, inner;

  __device__ __forceinline__ RowAt(const Divider& divider, uint32_t row) {
    outer = flat || divider.divisor == 1 ? row : divider.quotient(row);
    inner = flat || divider.divisor == 1 ? 0 : row - outer * divider.divisor;
  }

  template <class T>
  __device__ __forceinline__ T* element(T* first, const Strides& s, unsigned i) const {
    if constexpr (flat) {
      return first + (outer * static_cast<uint32_t>(s.outer) + i);
    } else {
      return first + (outer * s.outer + inner * s.inner) + i;
    }
  }
};

__device__ __forceinline__ float inverse_root(const Norm& a, float squares) {
  return rsqrtf(fmaf(squares, a.of_average, a.epsilon));
}

// The scaled value times the weight, as in the reference: the product is one of the weight's
// dtype; with an offset (Gemma) it is one of float32.
__device__ __forceinline__ float weighted(const Norm& a, float v, float w) {
  if (a.weight_offset != 0.0f) return v * (w + a.weight_offset);
  v = rounded_to(a.weight_type, v) * w;
  return a.weight_type == a.type ? v : rounded_to(a.weight_type, v);
}

// kPlain: the weight is of x's dtype and multiplied as it is, all of a row is averaged, and rows
// that take a block lie flat. kAny: whatever else, and without a weight.
enum Form { kPlain, kAny };

template <bool is_block>
__device__ __forceinline__ float sum_of_row(float x, float4* partial) {
  if constexpr (is_block) {
    return sum_of_block(x, partial);
  } else {
    return sum_of_lanes(x, blockDim.x);
  }
}

// --------------------------------------------------------------------- rows of whole vectors

template <class T, bool adds, int vectors, bool flat, Hint hint>
struct RowOf {
  static constexpr int kEach = kLanes<T>;
  uint4 x[vectors];
  uint4 residual[adds ? vectors : 1];

  __device__ __forceinline__ void read(const Norm& a, const RowAt<flat>& row, unsigned count,
                                       bool exists) {
    const T* from = static_cast<const T*>(a.x);
    const T* more = static_cast<const T*>(a.residual);
#pragma unroll
    for (int k = 0; k < vectors; k++) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      const bool here = exists && i < count;
      x[k] = residual[adds ? k : 0] = make_uint4(0, 0, 0, 0);
      if (here) {
        x[k] = load<hint>(row.element(from, a.x_strides, i * kEach));
        if constexpr (adds) {
          residual[k] = load<hint>(row.element(more, a.residual_strides, i * kEach));
        }
      }
    }
  }

  __device__ __forceinline__ void value(int k, float (&v)[kEach]) const {
    unpack<T>(x[k], v);
    if constexpr (adds) {
      float r[kEach];
      unpack<T>(residual[k], r);
#pragma unroll
      for (int e = 0; e < kEach; e++) v[e] += r[e];
    }
  }
};

template <class T, bool adds, Form form, int vectors, bool is_block, int variant>
__global__ void __launch_bounds__(is_block ? (vectors == 4 ? 512 : 1024) : 256)
    norm_of_vectors(const Norm a) {
  constexpr int each = kLanes<T>;
  constexpr Hint hint = variant & 1 ? kOnce : kKeep;
  constexpr bool persists = (variant & 2) != 0;
  constexpr bool flat = form == kPlain && is_block;
  using Row = RowAt<flat>;
  __shared__ float4 partial[persists ? 2 : 1][kMaxWarps / 4];
  const unsigned count = static_cast<unsigned>(a.hidden) / each;
  const uint32_t rows = static_cast<uint32_t>(a.rows);
  // A block's row is the same for all threads, which makes its addresses cheap.
  const uint32_t step = is_block ? gridDim.x : gridDim.x * blockDim.y;
  uint32_t at = is_block ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  await_previous_grid();

  RowOf<T, adds, vectors, flat, hint> now;
  now.read(a, Row(a.inner, at), count, is_block || at < rows);
  uint4 w[vectors] = {};
  if constexpr (form == kPlain) {
#pragma unroll
    for (int k = 0; k < vectors; k++) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      if (i < count) w[k] = load(static_cast<const T*>(a.weight) + i * each);
    }
  }
  for (int turn = 0;; turn ^= 1) {
    const Row row(a.inner, at);
    const bool exists = is_block || at < rows;
    Squares squares;
#pragma unroll
    for (int k = 0; k < vectors; k++) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      float v[each];
      now.value(k, v);
      if constexpr (form == kPlain) {
#pragma unroll
        for (int e = 0; e < each; e++) squares.add(e, v[e]);
      } else {
        const unsigned averaged = a.averaged;
#pragma unroll
        for (int e = 0; e < each; e++) squares.add(e, i * each + e < averaged ? v[e] : 0.0f);
      }
      if constexpr (adds) {
        if (exists && i < count) {
          store<hint>(row.element(static_cast<T*>(a.total), a.total_strides, i * each),
                      packed<T>(v));
        }
      }
    }
    // The next row is on its way while this one is summed.
    const uint32_t next = at + step;
    RowOf<T, adds, vectors, flat, hint> coming{};
    if constexpr (persists) coming.read(a, Row(a.inner, next), count, next < rows);
    const float scale =
        inverse_root(a, sum_of_row<is_block>(squares.sum(), partial[persists ? turn : 0]));
#pragma unroll
    for (int k = 0; k < vectors; k++) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      if (exists && i < count) {
        T* out = row.element(static_cast<T*>(a.out), a.out_strides, i * each);
        float v[each];
        now.value(k, v);
#pragma unroll
        for (int e = 0; e < each; e++) v[e] *= scale;
        if constexpr (form == kPlain) {
          store<hint>(out, times<T>(packed<T>(v), w[k]));
        } else {
          if (a.weight != nullptr) {
            float f[each];
            read_all(a.weight_type, a.weight, i * each, f);
#pragma unroll
            for (int e = 0; e < each; e++) v[e] = weighted(a, v[e], f[e]);
          }
          store<hint>(out, packed<T>(v));
        }
      }
    }
    if constexpr (!persists) return;
    if ((is_block ? next : next - threadIdx.y) >= rows) return;  // the same for the whole block
    at = next;
    now = coming;
  }
}

// ------------------------------------------------------------------------------- any other row

// Element by element, from any address, for rows of any size and number of dimensions. Each
// thread reads its elements again for the result: out and total may be x and the residual.
template <class T, bool adds, bool is_block>
__global__ void __launch_bounds__(is_block ? 1024 : 256, 1)
    norm_of_elements(const Norm a, VLLM_FL_IN_PLACE NormRows rows) {
  constexpr int each = kLanes<T>;
  __shared__ float4 partial[2][kMaxWarps / 4];
  await_previous_grid();
  int turn = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < a.rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y, turn ^= 1) {
    const int64_t at = first + threadIdx.y;
    const bool exists = at < a.rows;
    const T *x = nullptr, *residual = nullptr;
    T *out = nullptr, *total = nullptr;
    if (exists) {
      x = static_cast<const T*>(a.x) + rows.x.offset(at);
      out = static_cast<T*>(a.out) + rows.out.offset(at);
      if constexpr (adds) {
        residual = static_cast<const T*>(a.residual) + rows.residual.offset(at);
        total = static_cast<T*>(a.total) + rows.total.offset(at);
      }
    }
    const int size = exists ? a.hidden : 0;
    auto value = [&](int j) {
      float v = single(x[j]);
      if constexpr (adds) v += single(residual[j]);
      return v;
    };
    Squares squares;
    for (int i = threadIdx.x; i * each < size; i += blockDim.x) {
#pragma unroll
      for (int e = 0; e < each; e++) {
        const int j = i * each + e;
        if (j < size && j < a.averaged) squares.add(e, value(j));
      }
    }
    const float scale = inverse_root(a, sum_of_row<is_block>(squares.sum(), partial[turn]));
    for (int i = threadIdx.x; i * each < size; i += blockDim.x) {
      for (int j = i * each; j < (i + 1) * each && j < size; j++) {
        float v = value(j);
        if constexpr (adds) write(total + j, v);
        v *= scale;
        if (a.weight != nullptr) v = weighted(a, v, read_as(a.weight_type, a.weight, j));
        write(out + j, v);
      }
    }
  }
}

// ------------------------------------------------------------------------------------ launches

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline bool strides_are_aligned(const Strides& s, int lanes) {
  return s.outer % lanes == 0 && s.inner % lanes == 0;
}

inline bool takes_vectors(const Norm& a, int lanes) {
  if (!a.is_simple || a.rows > kMaxRows || a.hidden % lanes) return false;
  if (!is_aligned(a.x) || !is_aligned(a.out) || !is_aligned(a.weight)) return false;
  if (!strides_are_aligned(a.x_strides, lanes) || !strides_are_aligned(a.out_strides, lanes)) {
    return false;
  }
  return a.residual == nullptr ||
         (is_aligned(a.residual) && is_aligned(a.total) &&
          strides_are_aligned(a.residual_strides, lanes) &&
          strides_are_aligned(a.total_strides, lanes));
}

// Whether 32 bits number the elements of rows of one dimension.
inline bool is_flat(const Norm& a) {
  constexpr int64_t most = int64_t{1} << 31;
  for (const Strides* s : {&a.x_strides, &a.residual_strides, &a.out_strides, &a.total_strides}) {
    if (a.inner.divisor != 1 || s->outer < 0 || s->outer >= most) return false;
    if ((a.rows - 1) * s->outer + a.hidden > most) return false;
  }
  return true;
}

template <class T, bool adds, Form form, int vectors, bool is_block>
gpuError launch_vectors(const Norm& a, const NormShape& shape, gpuStream stream) {
  const NormLaunch how = norm_launch(shape, a.rows);
  const dim3 block(shape.threads, how.rows_per_block);
  const int64_t blocks = divided_up(a.rows, how.rows_per_block);
  const dim3 all(static_cast<unsigned>(blocks));
  const bool dependent = launches_depend();
  if constexpr (form == kPlain) {
    const dim3 some(static_cast<unsigned>(blocks < how.max_blocks ? blocks : how.max_blocks));
    if (how.variant == 1) {
      return launch(norm_of_vectors<T, adds, form, vectors, is_block, 1>, all, block, stream,
                    dependent, a);
    }
    if (how.variant == 2) {
      return launch(norm_of_vectors<T, adds, form, vectors, is_block, 2>, some, block, stream,
                    dependent, a);
    }
#if defined(VLLM_FL_TUNE)
    if (how.variant == 3) {
      return launch(norm_of_vectors<T, adds, form, vectors, is_block, 3>, some, block, stream,
                    dependent, a);
    }
#endif
  }
  return launch(norm_of_vectors<T, adds, form, vectors, is_block, 0>, all, block, stream,
                dependent, a);
}

template <class T, bool adds, Form form>
gpuError launch_shape(const Norm& a, const NormShape& shape, gpuStream stream) {
  switch (shape.vectors * 2 + shape.is_block) {
    case 2:
      return launch_vectors<T, adds, form, 1, false>(a, shape, stream);
    case 3:
      return launch_vectors<T, adds, form, 1, true>(a, shape, stream);
    case 4:
      return launch_vectors<T, adds, form, 2, false>(a, shape, stream);
    case 5:
      return launch_vectors<T, adds, form, 2, true>(a, shape, stream);
    case 8:
      return launch_vectors<T, adds, form, 4, false>(a, shape, stream);
    default:
      return launch_vectors<T, adds, form, 4, true>(a, shape, stream);
  }
}

template <class T, bool adds>
gpuError launch_adding(const Norm& a, const NormRows& rows, gpuStream stream) {
  const NormShape shape = norm_shape(a.hidden, kLanes<T>, adds);
  const bool fits = shape.vectors <= 4 && (shape.vectors < 4 || shape.threads <= 512);
  if (fits && takes_vectors(a, kLanes<T>)) {
    const bool plain = a.weight != nullptr && a.weight_type == a.type &&
                       a.weight_offset == 0.0f && a.averaged == a.hidden &&
                       (!shape.is_block || is_flat(a));
    return plain ? launch_shape<T, adds, kPlain>(a, shape, stream)
                 : launch_shape<T, adds, kAny>(a, shape, stream);
  }
  const NormLaunch how = norm_launch(shape, a.rows);
  const dim3 block(shape.threads, how.rows_per_block);
  const int64_t blocks = divided_up(a.rows, how.rows_per_block);
  const dim3 grid(static_cast<unsigned>(blocks < kMaxRows ? blocks : kMaxRows));
  return shape.is_block ? launch(norm_of_elements<T, adds, true>, grid, block, stream,
                                 launches_depend(), a, rows)
                        : launch(norm_of_elements<T, adds, false>, grid, block, stream,
                                 launches_depend(), a, rows);
}

}  // namespace

template <class T>
gpuError launch_norm_of(const Norm& a, const NormRows& rows, gpuStream stream) {
  return a.residual == nullptr ? launch_adding<T, false>(a, rows, stream)
                               : launch_adding<T, true>(a, rows, stream);
}

}  // namespace vllm_fl
