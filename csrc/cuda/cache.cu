// SPDX-License-Identifier: Apache-2.0
// Copies rows of new keys and values to their slots of a paged cache, both in one launch.
#include "kernels.h"
#include "tuning.h"

namespace vllm_fl {
namespace {

// In units of what is copied at once.
struct Copy {
  CacheWrite of;
  int64_t units;      // of a token, per side
  Divider per_head;   // units of a head
  Divider block_size;
  bool slots_have_32_bits;  // so many are in the cache
};

// Index: 32 bits where they number the units. one_head: all of a token lies in one piece. sides: of a
// thread, both or the one of the grid's z.
template <class Unit, class Index, bool one_head, int sides>
__global__ void __launch_bounds__(256) write_rows(VLLM_FL_IN_PLACE Copy a) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const uint32_t unit = blockIdx.y * blockDim.x + threadIdx.x;
  if (token >= a.of.tokens || unit >= a.units) return;
  await_previous_grid();
  const uint32_t head = one_head ? 0 : a.per_head.quotient(unit);
  const Index within = one_head ? unit : unit - head * a.per_head.divisor;
  const int first = sides == 2 ? 0 : blockIdx.z;
  Unit moved[sides];
#pragma unroll
  for (int k = 0; k < sides; k++) {
    const CachedSide& side = a.of.sides[first + k];
    const Index at = static_cast<Index>(token) * static_cast<Index>(side.token_stride) +
                     head * static_cast<Index>(side.head_stride) + within;
    moved[k] = static_cast<const Unit*>(side.rows)[at];
  }
  loads_so_far();
  const int64_t slot = a.of.slots_are_64_bit ? static_cast<const int64_t*>(a.of.slots)[token]
                                             : static_cast<const int32_t*>(a.of.slots)[token];
  if (slot < 0 || slot >= a.of.blocks * a.of.block_size) return;
  const Index block = a.slots_have_32_bits ? a.block_size.quotient(static_cast<uint32_t>(slot))
                                           : static_cast<Index>(slot / a.of.block_size);
  const Index row =
      static_cast<Index>(slot) - block * static_cast<Index>(a.of.block_size);
#pragma unroll
  for (int k = 0; k < sides; k++) {
    const CachedSide& side = a.of.sides[first + k];
    const Index at = block * static_cast<Index>(side.block_stride) +
                     row * static_cast<Index>(side.slot_stride) +
                     head * static_cast<Index>(side.cache_head_stride) + within;
    static_cast<Unit*>(side.cache)[at] = moved[k];
  }
}

// Whether all of a copy goes in units of so many bytes.
bool fits(const CacheWrite& a, int bytes) {
  const int64_t elements = bytes / a.element_size;
  if (bytes < a.element_size || a.head_size % elements) return false;
  for (const CachedSide& side : a.sides) {
    const uintptr_t addresses =
        reinterpret_cast<uintptr_t>(side.rows) | reinterpret_cast<uintptr_t>(side.cache);
    if (addresses % bytes) return false;
    for (int64_t stride : {side.token_stride, side.head_stride, side.block_stride,
                           side.slot_stride, side.cache_head_stride}) {
      if (stride % elements) return false;
    }
  }
  return true;
}

// Whether 32 bits number the units, in the rows and in the caches.
bool is_narrow(const CacheWrite& a) {
  constexpr int64_t most = int64_t{1} << 31;
  if (a.blocks * a.block_size > kMaxRows || a.tokens > kMaxRows) return false;
  for (const CachedSide& side : a.sides) {
    for (int64_t stride : {side.token_stride, side.head_stride, side.block_stride,
                           side.slot_stride, side.cache_head_stride}) {
      if (stride < 0 || stride >= most) return false;
    }
    const int64_t heads = a.heads * side.cache_head_stride;
    if (a.tokens * side.token_stride + a.heads * side.head_stride >= most) return false;
    if (a.blocks * side.block_stride + a.block_size * side.slot_stride + heads >= most) {
      return false;
    }
  }
  return true;
}

template <class Unit, int sides>
gpuError launch_sides(const Copy& copy, dim3 grid, dim3 block, gpuStream stream) {
  const bool dependent = launches_depend();
  if (!is_narrow(copy.of)) {
    return launch(write_rows<Unit, int64_t, false, sides>, grid, block, stream, dependent, copy);
  }
  return copy.of.heads == 1
             ? launch(write_rows<Unit, uint32_t, true, sides>, grid, block, stream, dependent, copy)
             : launch(write_rows<Unit, uint32_t, false, sides>, grid, block, stream, dependent,
                      copy);
}

template <class Unit>
gpuError launch_units(CacheWrite a, gpuStream stream) {
  const int64_t elements = static_cast<int64_t>(sizeof(Unit)) / a.element_size;
  // Heads that lie one behind the other everywhere are one.
  bool dense = true;
  for (const CachedSide& side : a.sides) {
    dense = dense && side.head_stride == a.head_size && side.cache_head_stride == a.head_size;
  }
  if (dense || a.heads == 1) {
    a.head_size *= a.heads;
    a.heads = 1;
    for (CachedSide& side : a.sides) side.head_stride = side.cache_head_stride = a.head_size;
  }
  for (CachedSide& side : a.sides) {
    for (int64_t* stride : {&side.token_stride, &side.head_stride, &side.block_stride,
                            &side.slot_stride, &side.cache_head_stride}) {
      *stride /= elements;
    }
  }
  Copy copy{};
  copy.of = a;
  const int64_t per_head = a.head_size / elements;
  copy.units = per_head * a.heads;
  copy.per_head = Divider(static_cast<uint32_t>(per_head));
  copy.slots_have_32_bits = a.blocks * a.block_size <= kMaxRows;
  if (copy.slots_have_32_bits) copy.block_size = Divider(static_cast<uint32_t>(a.block_size));
  const int sides = cache_sides(copy.units, a.tokens);
  const int threads = cache_threads(copy.units, a.tokens, sides);
  const int64_t chunks = divided_up(copy.units, threads);
  const int columns = static_cast<int>(divided_up(copy.units, chunks));
  const int rows = threads / columns;
  const dim3 block(columns, rows);
  const dim3 grid(static_cast<unsigned>(divided_up(a.tokens, rows)),
                  static_cast<unsigned>(chunks), 2 / sides);
  return sides == 2 ? launch_sides<Unit, 2>(copy, grid, block, stream)
                    : launch_sides<Unit, 1>(copy, grid, block, stream);
}

}  // namespace

gpuError launch_cache_write(const CacheWrite& a, gpuStream stream) {
  if (fits(a, 16)) return launch_units<uint4>(a, stream);
  if (fits(a, 4)) return launch_units<uint32_t>(a, stream);
  return launch_units<uint16_t>(a, stream);
}

}  // namespace vllm_fl
