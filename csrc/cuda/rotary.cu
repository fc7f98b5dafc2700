// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of query and key heads, in place, in one launch, computed in float32 and rounded
// once; the angles are those that the heads' dtype holds.
#include "turning.cuh"

namespace vllm_fl {
namespace {

// Tokens over the grid's y and z, heads over its x and over the block's y, the units of a head
// over the block's x. A thread turns one unit.
template <class T, bool own_type, bool is_neox>
__global__ void __launch_bounds__(512) rotary_of_vectors(const Rotary a) {
  constexpr int each = kLanes<T>;
  const uint32_t token = blockIdx.z * gridDim.y + blockIdx.y;
  if (token >= static_cast<uint32_t>(a.tokens)) return;
  const uint32_t queries = static_cast<uint32_t>(a.turned[0].heads);
  const uint32_t all = queries + static_cast<uint32_t>(a.turned[1].heads);
  const uint32_t head = blockIdx.x * blockDim.y + threadIdx.y;
  const bool is_query = head < queries, exists = head < all;
  // 32 bits number the elements.
  const uint32_t place =
      is_query ? token * static_cast<uint32_t>(a.turned[0].token_stride) +
                     head * static_cast<uint32_t>(a.turned[0].head_stride)
               : token * static_cast<uint32_t>(a.turned[1].token_stride) +
                     (head - queries) * static_cast<uint32_t>(a.turned[1].head_stride);
  T* at = static_cast<T*>(is_query ? a.turned[0].data : a.turned[1].data) + place;
  const int unit = threadIdx.x;
  const int low = first_of<is_neox>(unit, each), high = second_of<is_neox>(unit, each, a.half);
  await_previous_grid();
  uint4 x, y;
  if (exists) {
    x = load(at + low);
    y = load(at + high);
  }
  loads_so_far();
  const Turns<T, own_type> turns(a.angles, position_of(a.angles, token), unit * each, a.half);
  if (!exists) return;
  uint4 cosines, sines;
  turns.look(a.angles, a.half, cosines, sines);
  float v[each], w[each];
  unpack<T>(x, v);
  unpack<T>(y, w);
  turn<T, is_neox>(v, w, cosines, sines);
  store(at + low, packed<T>(v));
  store(at + high, packed<T>(w));
}

// Pair by pair, at any address. A block turns a token's heads.
template <class T>
__global__ void __launch_bounds__(256, 1)
    rotary_of_pairs(VLLM_FL_IN_PLACE Rotary a, VLLM_FL_IN_PLACE RotaryRows rows) {
  await_previous_grid();
  const int64_t tokens_at_once = static_cast<int64_t>(gridDim.y) * gridDim.z;
  for (int64_t token = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
       token < a.tokens; token += tokens_at_once) {
    const int64_t position = position_of(a.angles, token);
    const int64_t angle = position * a.angles.cache_stride;
    for (int side = 0; side < 2; side++) {
      const Heads& h = a.turned[side];
      for (int64_t head = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
           head < h.heads; head += static_cast<int64_t>(gridDim.x) * blockDim.y) {
        int64_t at;
        if (a.is_simple) {
          at = token * h.token_stride + head * h.head_stride;
        } else {
          const HeadRows& r = rows.turned[side];
          const int64_t row = head / r.heads_per_row;
          at = r.rows.offset(token * r.rows_per_token + row) +
               (head - row * r.heads_per_row) * a.head_size;
        }
        T* x = static_cast<T*>(h.data) + at;
        for (int i = threadIdx.x; i < a.half; i += blockDim.x) {
          T* low = x + (a.is_neox ? i : 2 * i);
          T* high = x + (a.is_neox ? a.half + i : 2 * i + 1);
          float cosine = __uint_as_float(0x7fffffffu), sine = cosine;
          if (position >= 0) {
            cosine = rounded<T>(read_as(a.angles.cache_type, a.angles.cache, angle + i));
            sine = rounded<T>(read_as(a.angles.cache_type, a.angles.cache, angle + a.half + i));
          }
          const Pair p = turned(single(*low), single(*high), cosine, sine);
          write(low, p.low);
          write(high, p.high);
        }
      }
    }
  }
}

bool takes_vectors(const Rotary& a, int lanes) {
  if (!a.is_simple || !angles_are_aligned(a.angles, a.half, lanes)) return false;
  if (a.half / lanes > 512) return false;  // units of a head, each of which has a thread
  constexpr int64_t most = int64_t{1} << 31;
  for (const Heads& h : a.turned) {
    if (h.data == nullptr) continue;
    if (!is_aligned(h.data) || h.token_stride % lanes || h.head_stride % lanes) return false;
    if (h.token_stride < 0 || h.head_stride < 0 || h.token_stride >= most ||
        h.head_stride >= most || a.tokens * h.token_stride + h.heads * h.head_stride > most) {
      return false;
    }
  }
  return true;
}

template <class T, bool own_type, bool is_neox>
gpuError launch_vectors(const Rotary& a, gpuStream stream) {
  constexpr int64_t most = 65535;
  const int64_t heads = a.turned[0].heads + a.turned[1].heads;
  const RotaryLaunch how = rotary_launch(a.half / kLanes<T>, heads, a.tokens);
  const int64_t chunks = divided_up(heads, how.rows);
  const int64_t high = a.tokens < most ? a.tokens : most;
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(high),
                  static_cast<unsigned>(divided_up(a.tokens, high)));
  const dim3 block(how.columns, how.rows);
  return launch(rotary_of_vectors<T, own_type, is_neox>, grid, block, stream, launches_depend(),
                a);
}

template <class T>
gpuError launch_type(const Rotary& a, const RotaryRows& rows, gpuStream stream) {
  constexpr int64_t most = 65535;
  if (takes_vectors(a, kLanes<T>) && a.tokens <= kMaxRows) {
    const bool own_type = a.angles.cache_type == a.type;
    if (own_type) {
      return a.is_neox ? launch_vectors<T, true, true>(a, stream)
                       : launch_vectors<T, true, false>(a, stream);
    }
    return a.is_neox ? launch_vectors<T, false, true>(a, stream)
                     : launch_vectors<T, false, false>(a, stream);
  }
  const int columns = a.half < 64 ? power_of_two_from(a.half) : 64;
  const dim3 block(columns, 128 / columns);
  const int64_t heads =
      a.turned[0].heads > a.turned[1].heads ? a.turned[0].heads : a.turned[1].heads;
  const int64_t chunks = divided_up(heads, block.y), high = a.tokens < most ? a.tokens : most;
  const int64_t deep = divided_up(a.tokens, high);
  const dim3 grid(static_cast<unsigned>(chunks < most ? chunks : most),
                  static_cast<unsigned>(high), static_cast<unsigned>(deep < most ? deep : most));
  return launch(rotary_of_pairs<T>, grid, block, stream, launches_depend(), a, rows);
}

}  // namespace

gpuError launch_rotary(const Rotary& a, const RotaryRows& rows, gpuStream stream) {
  return a.type == kFloat32    ? launch_type<float>(a, rows, stream)
         : a.type == kBFloat16 ? launch_type<BFloat16>(a, rows, stream)
                               : launch_type<Float16>(a, rows, stream);
}

}  // namespace vllm_fl
