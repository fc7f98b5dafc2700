// SPDX-License-Identifier: Apache-2.0
// RMS norms of rows, with and without the addition of a residual; one .cu file for each dtype
// instantiates `launch_norm_of`.
//
// A row is summed in one order, whatever the launch: vectors of 16 bytes by 32, one for each lane,
// whose sums meet over the lanes; then these sums, 32 at most in a tree and further ones behind
// them. Which threads do it, how many vectors each of them has, and whether it reads vectors or
// elements, changes no bit; nor does what lies around the row. All is computed in float32, and the
// result is rounded once.
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

// The scaled value times the weight.
__device__ __forceinline__ float weighted(const Norm& a, float v, float w) {
  return v * (a.weight_offset == 0.0f ? w : w + a.weight_offset);
}

// kPlain: the weight is of x's dtype, all of a row is averaged, and rows that take a block lie
// flat. kOffset: the same, with an offset. kAny: whatever else, and without a weight.
enum Form { kPlain, kOffset, kAny };

// -------------------------------------------------------------------------- the order of a sum

constexpr int kSlots = 128;  // sums of 32 vectors each; those of longer rows share them

// How many slots are read: those that have no sum hold 0.
__device__ __forceinline__ unsigned read_slots(unsigned slots) {
  return slots <= 4 ? 4 : slots <= 8 ? 8 : slots <= 16 ? 16 : (slots + 31) / 32 * 32;
}

template <int count>
__device__ __forceinline__ float tree(const float4* from) {
  float4 v[count];
#pragma unroll
  for (int i = 0; i < count; i++) v[i] = from[i];  // all on their way before the first is used
  float sums[count];
#pragma unroll
  for (int i = 0; i < count; i++) sums[i] = (v[i].x + v[i].y) + (v[i].z + v[i].w);
#pragma unroll
  for (int width = count / 2; width; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  }
  return sums[0];
}

// are_many: there may be more than 32.
template <bool are_many>
__device__ __forceinline__ float sum_of_slots(const float4* slots, unsigned count) {
  if (count <= 4) return tree<1>(slots);
  if (count <= 8) return tree<2>(slots);
  if (count <= 16) return tree<4>(slots);
  if constexpr (!are_many) return tree<8>(slots);
  float sum = tree<8>(slots);
#pragma unroll 1
  for (unsigned i = 32; i < count; i += 4) sum += tree<1>(slots + i / 4);
  return sum;
}

// The same of up to four sums that a thread has itself.
template <int count>
__device__ __forceinline__ float sum_of_own(const float (&sums)[count]) {
  if constexpr (count == 1) return sums[0];
  if constexpr (count == 2) return sums[0] + sums[1];
  if constexpr (count == 4) return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// --------------------------------------------------------------------- rows of whole vectors

enum Reach { kOneWarp, kOneBlock, kLongRow };  // a long one has more than 32 slots

// So that a multiprocessor holds 2048 threads with one vector, 1536 with two, or 1024 with a
// residual; with four 1024 with a residual, else 896: in either case four blocks for 7168 elements
// of half precision, and 512 rows are one wave.
constexpr int most_with_four(bool adds) { return adds ? 256 : 224; }

constexpr int most_threads(int vectors, Reach reach, bool adds) {
  if (reach == kOneWarp) return 256;
  return reach == kLongRow ? 512 : vectors == 4 ? most_with_four(adds) : kMaxThreads / vectors;
}
constexpr int least_blocks(int vectors, Reach reach, Form form, bool adds) {
  if (form == kAny && vectors == 4) return 1;  // it has no registers to spare
  if (reach == kOneWarp) return vectors == 1 ? 8 : 3;
  if (reach == kLongRow) return 1;
  if (vectors == 4) return 4;
  return vectors == 2 && !adds ? 3 : 2;
}

// A thread has vectors i = threadIdx.x + k * blockDim.x of a row. It asks for their weights before
// the sum, although that takes registers: behind it, with four vectors, 2048 rows of 4096 took
// 11.4 us instead of 9.7. With a residual there are none left, and it makes no difference.
template <class T, bool adds, Form form, int vectors, Reach reach>
__global__ void __launch_bounds__(most_threads(vectors, reach, adds),
                                  least_blocks(vectors, reach, form, adds))
    norm_of_vectors(const Norm a) {
  constexpr int each = kLanes<T>;
  constexpr bool is_block = reach != kOneWarp;
  constexpr bool flat = form != kAny && is_block;
  constexpr bool early = form != kAny && !(adds && vectors == 4);
  __shared__ float4 slots[reach == kLongRow ? kSlots / 4 : is_block ? kWarp / 4 : 1];
  const unsigned count = static_cast<unsigned>(a.hidden) / each;
  // A block's row is the same for all threads, which makes its addresses cheap.
  const uint32_t at = is_block ? blockIdx.x : blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = is_block || at < static_cast<uint32_t>(a.rows);
  const RowAt<flat> row(a.inner, at);
  await_previous_grid();

  uint4 x[vectors], residual[vectors], w[vectors];
#pragma unroll
  for (int k = 0; k < vectors; k++) {
    const unsigned i = threadIdx.x + k * blockDim.x;
    x[k] = residual[k] = make_uint4(0, 0, 0, 0);
    if (exists && i < count) {
      x[k] = load(row.element(static_cast<const T*>(a.x), a.x_strides, i * each));
      if constexpr (adds) {
        residual[k] =
            load(row.element(static_cast<const T*>(a.residual), a.residual_strides, i * each));
      }
    }
  }
  if constexpr (early) {
#pragma unroll
    for (int k = 0; k < vectors; k++) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      if (i < count) w[k] = load(static_cast<const T*>(a.weight) + i * each);
    }
  }
  auto value = [&](int k, float(&v)[each]) {
    unpack<T>(x[k], v);
    if constexpr (adds) {
      float r[each];
      unpack<T>(residual[k], r);
#pragma unroll
      for (int e = 0; e < each; e++) v[e] += r[e];
    }
  };

  // The sum of x and the residual. With few vectors it is left behind the exchange, where there is
  // time for it; with four, of which many rows are made, it would take registers until then.
  auto leave_total = [&](int k) {
    if constexpr (adds) {
      const unsigned i = threadIdx.x + k * blockDim.x;
      float v[each];
      value(k, v);
      const uint4 total = packed<T>(v);
      T* to = row.element(static_cast<T*>(a.total), a.total_strides, i * each);
      if (exists && i < count) store(to, total);
    }
  };

  float sums[vectors];
#pragma unroll
  for (int k = 0; k < vectors; k++) {
    const unsigned i = threadIdx.x + k * blockDim.x;
    float v[each];
    value(k, v);
    Squares squares;
#pragma unroll
    for (int e = 0; e < each; e++) {
      const bool counts = form != kAny || i * each + e < static_cast<unsigned>(a.averaged);
      squares.add(e, counts ? v[e] : 0.0f);
    }
    sums[k] = squares.sum();
    if constexpr (vectors == 4) leave_total(k);
  }
  auto leave_totals = [&] {
#pragma unroll
    for (int k = 0; k < vectors && vectors < 4; k++) leave_total(k);
  };
  const int lanes = is_block ? kWarp : static_cast<int>(blockDim.x);
#pragma unroll
  for (int k = 0; k < vectors; k++) sums[k] = sum_of_lanes(sums[k], lanes);
  float sum;
  if constexpr (is_block) {
    const unsigned used = (count + kWarp - 1) / kWarp, read = read_slots(used);
    float* slot = reinterpret_cast<float*>(slots);
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int k = 0; k < vectors; k++) {
        const unsigned i = (threadIdx.x + k * blockDim.x) / kWarp;
        if (i < used) slot[i] = sums[k];
      }
    }
    if (threadIdx.x + used < read) slot[threadIdx.x + used] = 0.0f;
    __syncthreads();
    leave_totals();
    sum = sum_of_slots<reach == kLongRow>(slots, read);
  } else {
    leave_totals();
    sum = sum_of_own(sums);
  }

  const float scale = inverse_root(a, sum);
#pragma unroll
  for (int k = 0; k < vectors; k++) {
    const unsigned i = threadIdx.x + k * blockDim.x;
    if (!exists || i >= count) continue;
    if constexpr (form != kAny && !early) w[k] = load(static_cast<const T*>(a.weight) + i * each);
    T* out = row.element(static_cast<T*>(a.out), a.out_strides, i * each);
    float v[each], f[each];
    value(k, v);
#pragma unroll
    for (int e = 0; e < each; e++) v[e] *= scale;
    if constexpr (form != kAny) {
      unpack<T>(w[k], f);
#pragma unroll
      for (int e = 0; e < each; e++) v[e] *= form == kPlain ? f[e] : f[e] + a.weight_offset;
    } else if (a.weight != nullptr) {
      read_all(a.weight_type, a.weight, i * each, f);
#pragma unroll
      for (int e = 0; e < each; e++) v[e] = weighted(a, v[e], f[e]);
    }
    store(out, packed<T>(v));
  }
}

// ------------------------------------------------------------------------------- any other row

// Element by element, from any address, for rows of any size and number of dimensions. Each
// thread reads its elements again for the result: out and total may be x and the residual.
template <class T, bool adds, bool is_block>
__global__ void __launch_bounds__(is_block ? 1024 : 256, 1)
    norm_of_elements(const Norm a, VLLM_FL_IN_PLACE NormRows rows) {
  constexpr int each = kLanes<T>;
  __shared__ float4 slots[2][is_block ? kSlots / 4 : 1];
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
    auto value = [&](int64_t j) {
      float v = single(x[j]);
      if constexpr (adds) v += single(residual[j]);
      return v;
    };
    const int64_t count = (static_cast<int64_t>(a.hidden) + each - 1) / each;
    float* slot = reinterpret_cast<float*>(slots[turn]);
    float sum = 0.0f;
    for (int64_t k = 0; k * blockDim.x < count; k++) {  // as often in every thread
      const int64_t i = threadIdx.x + k * blockDim.x;
      Squares squares;
#pragma unroll
      for (int e = 0; e < each; e++) {
        const int64_t j = i * each + e;
        if (exists && j < a.hidden && j < a.averaged) squares.add(e, value(j));
      }
      const float own = sum_of_lanes(squares.sum(), is_block ? kWarp : blockDim.x);
      if constexpr (is_block) {
        const unsigned s = static_cast<unsigned>(i / kWarp % kSlots);
        if (threadIdx.x % kWarp == 0) slot[s] = i / kWarp < kSlots ? own : slot[s] + own;
      } else {
        sum = own;  // there is one
      }
    }
    if constexpr (is_block) {
      const int64_t all = (count + kWarp - 1) / kWarp;
      const unsigned used = all < kSlots ? static_cast<unsigned>(all) : kSlots;
      const unsigned read = read_slots(used);
      if (threadIdx.x + used < read) slot[threadIdx.x + used] = 0.0f;
      __syncthreads();
      sum = sum_of_slots<true>(slots[turn], read);
    }
    const float scale = inverse_root(a, sum);
    const int64_t size = exists ? a.hidden : 0;
    for (int64_t i = threadIdx.x; i * each < size; i += blockDim.x) {
      for (int64_t j = i * each; j < (i + 1) * each && j < size; j++) {
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

template <class T, bool adds, Form form, int vectors, Reach reach>
gpuError launch_vectors(const Norm& a, const NormShape& shape, gpuStream stream) {
  const dim3 block(shape.threads, shape.rows);
  const dim3 grid(static_cast<unsigned>(divided_up(a.rows, shape.rows)));
  return launch(norm_of_vectors<T, adds, form, vectors, reach>, grid, block, stream,
                launches_depend(), a);
}

template <class T, bool adds, Form form>
gpuError launch_shape(const Norm& a, const NormShape& shape, gpuStream stream) {
  if (shape.is_block && shape.vectors == 4 && shape.threads > most_with_four(adds)) {
    return launch_vectors<T, adds, form, 4, kLongRow>(a, shape, stream);
  }
  switch (shape.vectors * 2 + shape.is_block) {
    case 2:
      return launch_vectors<T, adds, form, 1, kOneWarp>(a, shape, stream);
    case 3:
      return launch_vectors<T, adds, form, 1, kOneBlock>(a, shape, stream);
    case 5:
      return launch_vectors<T, adds, form, 2, kOneBlock>(a, shape, stream);
    case 8:
      return launch_vectors<T, adds, form, 4, kOneWarp>(a, shape, stream);
    default:
      return launch_vectors<T, adds, form, 4, kOneBlock>(a, shape, stream);
  }
}

template <class T, bool adds>
gpuError launch_adding(const Norm& a, const NormRows& rows, gpuStream stream) {
  const int64_t vectors = divided_up(a.hidden, kLanes<T>);
  if (vectors <= 4 * 512 && takes_vectors(a, kLanes<T>)) {
    const NormShape shape = norm_shape(vectors, a.rows, adds);
    const bool own = a.weight != nullptr && a.weight_type == a.type && a.averaged == a.hidden &&
                     (!shape.is_block || is_flat(a));
    if (!own) return launch_shape<T, adds, kAny>(a, shape, stream);
    return a.weight_offset == 0.0f ? launch_shape<T, adds, kPlain>(a, shape, stream)
                                   : launch_shape<T, adds, kOffset>(a, shape, stream);
  }
  // One vector for each thread, as far as a block reaches.
  const bool is_block = vectors > kWarp;
  const int threads = is_block ? rounded_up_to_warps(vectors < kMaxThreads ? vectors : kMaxThreads)
                               : power_of_two_from(vectors);
  const dim3 block(threads, is_block ? 1 : 4 * kWarp / threads);
  const int64_t blocks = divided_up(a.rows, block.y);
  const dim3 grid(static_cast<unsigned>(blocks < kMaxRows ? blocks : kMaxRows));
  return is_block ? launch(norm_of_elements<T, adds, true>, grid, block, stream,
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
