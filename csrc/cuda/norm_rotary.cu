// SPDX-License-Identifier: Apache-2.0
// The norms of query and key heads and their rotary embedding, in place in a projection, in one
// launch, computed in float32 and rounded once; the angles are those that the heads' dtype holds.
//
// A head is summed by a fixed set of lanes in a fixed order (`Cut`), whichever kernel reads it.
#include "turning.cuh"

namespace vllm_fl {
namespace {

// How a head is cut up: units of `each` pairs, then what is not turned, in vectors of `each`.
struct Cut {
  int each;
  int units;
  int rest;   // vectors behind the turned elements
  int lanes;  // a power of two; unit and vector i are of lane i % lanes
};

Cut cut_of(int head_size, int half, int vector) {
  Cut cut{};
  cut.each = half % vector || head_size % vector ? 1 : vector;
  cut.units = half / cut.each;
  cut.rest = (head_size - 2 * half) / cut.each;
  const int64_t wanted = cut.rest > 2 * cut.units ? (cut.rest + 1) / 2 : cut.units;
  cut.lanes = power_of_two_from(wanted < kWarp ? wanted : kWarp);
  return cut;
}

__device__ __forceinline__ float inverse_root(const NormRotary& a, float squares) {
  return rsqrtf(fmaf(squares, a.of_average, a.epsilon));
}

// Explicit operations: what follows is no reason to contract them.
__device__ __forceinline__ float normed(float v, float scale, float w) {
  return __fmul_rn(__fmul_rn(v, scale), w);
}

// A vector; `own` is its weight where that is of type T.
template <class T>
__device__ __forceinline__ void norm_all(float (&v)[kLanes<T>], float scale, const void* weight,
                                         int at, int weight_type, uint4 own) {
  float w[kLanes<T>];
  if (weight_type == TypeOf<T>::value) {
    unpack<T>(own, w);
  } else {
    read_all(weight_type, weight, at, w);
  }
#pragma unroll
  for (int e = 0; e < kLanes<T>; e++) v[e] = normed(v[e], scale, w[e]);
}

// A lane has one unit of a head, and up to two vectors of the rest.
template <class T, bool is_neox>
__global__ void __launch_bounds__(256, 2) norm_rotary_of_vectors(const NormRotary a, const Cut cut) {
  constexpr int each = kLanes<T>, kRest = 2;
  const uint32_t token = blockIdx.z * gridDim.y + blockIdx.y;
  const int head = blockIdx.x * blockDim.y + threadIdx.y;
  const bool is_query = head < a.query_heads;
  const bool exists =
      token < static_cast<uint32_t>(a.tokens) && head < a.query_heads + a.key_heads;
  const int unit = threadIdx.x;
  const int low = first_of<is_neox>(unit, each), high = second_of<is_neox>(unit, each, a.half);
  const bool turning = exists && unit < cut.units;
  // 32 bits number the elements.
  T* const all = static_cast<T*>(a.qkv);
  uint32_t place = token * static_cast<uint32_t>(a.token_stride) +
                   static_cast<uint32_t>(head * a.head_size);
  const void* weight = is_query ? a.query_weight : a.key_weight;
  const int weight_type = is_query ? a.query_weight_type : a.key_weight_type;
  const bool own = weight_type == TypeOf<T>::value;
  await_previous_grid();

  const uint4 nothing = make_uint4(0, 0, 0, 0);
  uint4 v = nothing, w = nothing, v_weight = nothing, w_weight = nothing;
  uint4 rest[kRest], rest_weight[kRest];
  if (turning) {
    v = load(all + (place + low));
    w = load(all + (place + high));
  }
  if (turning && own) {
    v_weight = load(static_cast<const T*>(weight) + low);
    w_weight = load(static_cast<const T*>(weight) + high);
  }
#pragma unroll
  for (int k = 0; k < kRest; k++) {
    const int i = threadIdx.x + k * blockDim.x, at = 2 * a.half + i * each;
    const bool here = exists && i < cut.rest;
    rest_weight[k] = here && own ? load(static_cast<const T*>(weight) + at) : nothing;
    rest[k] = here ? load(all + (place + at)) : nothing;
  }
  loads_so_far();
  const int64_t position = turning ? position_of(a.angles, token) : -1;
  const Turns<T, false> turns(a.angles, position, unit * each, a.half);

  Squares squares;
  float vs[each], ws[each];
  unpack<T>(v, vs);
  unpack<T>(w, ws);
#pragma unroll
  for (int e = 0; e < each; e++) squares.add(e, vs[e]);
#pragma unroll
  for (int e = 0; e < each; e++) squares.add(e, ws[e]);
#pragma unroll
  for (int k = 0; k < kRest; k++) {
    float rs[each];
    unpack<T>(rest[k], rs);
#pragma unroll
    for (int e = 0; e < each; e++) squares.add(e, rs[e]);
  }
  const float scale = inverse_root(a, sum_of_lanes(squares.sum(), blockDim.x));
  forget(place);
  if (turning) {
    uint4 cosines, sines;
    turns.look(a.angles, a.half, cosines, sines);
    norm_all<T>(vs, scale, weight, low, weight_type, v_weight);
    norm_all<T>(ws, scale, weight, high, weight_type, w_weight);
    turn<T, is_neox>(vs, ws, cosines, sines);
    store(all + (place + low), packed<T>(vs));
    store(all + (place + high), packed<T>(ws));
  }
#pragma unroll
  for (int k = 0; k < kRest; k++) {
    const int i = threadIdx.x + k * blockDim.x, at = 2 * a.half + i * each;
    if (exists && i < cut.rest) {
      float rs[each];
      unpack<T>(rest[k], rs);
      norm_all<T>(rs, scale, weight, at, weight_type, rest_weight[k]);
      store(all + (place + at), packed<T>(rs));
    }
  }
}

// The same where every lane has a unit, nothing is left over, and all is of type T: what most models
// ask for. Above a few thousand tokens instructions are what limits it beside the memory, and so are
// counted.
template <class T, bool is_neox, int lanes>
__global__ void __launch_bounds__(256, 6) norm_rotary_of_whole_heads(const NormRotary a) {
  constexpr int each = kLanes<T>;
  const uint32_t token = blockIdx.z * gridDim.y + blockIdx.y;
  if (token >= static_cast<uint32_t>(a.tokens)) return;
  const int all_heads = a.query_heads + a.key_heads;
  const int own_head = blockIdx.x * blockDim.y + threadIdx.y;
  const int head = own_head < all_heads ? own_head : 0;  // a head too many reads, for the warp's sake
  const int unit = threadIdx.x, half = lanes * each;
  const int low = first_of<is_neox>(unit, each), high = second_of<is_neox>(unit, each, half);
  uint32_t place = token * static_cast<uint32_t>(a.token_stride) +
                   static_cast<uint32_t>(head * 2 * half);
  T* const all = static_cast<T*>(a.qkv);
  const T* weight = static_cast<const T*>(head < a.query_heads ? a.query_weight : a.key_weight);
  await_previous_grid();

  const uint4 v = load(all + (place + low)), w = load(all + (place + high));
  const uint4 v_weight = load(weight + low), w_weight = load(weight + high);
  loads_so_far();
  const uint64_t position = static_cast<const uint64_t*>(a.angles.positions)[token];
  const bool known = position < static_cast<uint64_t>(a.angles.cache_rows);
  const uint32_t row = known ? static_cast<uint32_t>(position) : 0;
  const T* angle = static_cast<const T*>(a.angles.cache) +
                   (row * static_cast<uint32_t>(a.angles.cache_stride) + unit * each);
  const uint4 cosines = load(angle), sines = load(angle + half);

  Squares squares;
  float vs[each], ws[each], x[each];
  unpack<T>(v, vs);
  unpack<T>(w, ws);
#pragma unroll
  for (int e = 0; e < each; e++) squares.add(e, vs[e]);
#pragma unroll
  for (int e = 0; e < each; e++) squares.add(e, ws[e]);
  float scale = inverse_root(a, sum_of_lanes(squares.sum(), lanes));
  if (!known) scale = __uint_as_float(0x7fffffffu);
  forget(place);
  unpack<T>(v_weight, x);
#pragma unroll
  for (int e = 0; e < each; e++) vs[e] = normed(vs[e], scale, x[e]);
  unpack<T>(w_weight, x);
#pragma unroll
  for (int e = 0; e < each; e++) ws[e] = normed(ws[e], scale, x[e]);
  turn<T, is_neox>(vs, ws, cosines, sines);
  if (own_head >= all_heads) return;
  store(all + (place + low), packed<T>(vs));
  store(all + (place + high), packed<T>(ws));
}

// Element by element, at any address and for heads of any size.
template <class T, bool is_neox>
__global__ void __launch_bounds__(256, 1)
    norm_rotary_of_pairs(const NormRotary a, const Cut cut) {
  await_previous_grid();
  const int each = cut.each;
  const int64_t tokens_at_once = static_cast<int64_t>(gridDim.y) * gridDim.z;
  for (int64_t token = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
       token < a.tokens; token += tokens_at_once) {
    const int head = blockIdx.x * blockDim.y + threadIdx.y;
    const bool exists = head < a.query_heads + a.key_heads, is_query = head < a.query_heads;
    T* x = static_cast<T*>(a.qkv) + token * a.token_stride +
           static_cast<int64_t>(head) * a.head_size;
    const int units = exists ? cut.units : 0, rest = exists ? cut.rest : 0;
    // With units of one pair the partial sums take turns over the elements of a lane.
    Squares squares;
    int place = 0;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      const int low = first_of<is_neox>(unit, each);
      const int high = second_of<is_neox>(unit, each, a.half);
      for (int e = 0; e < each; e++, place++) squares.add_at(place, single(x[low + e]));
      for (int e = 0; e < each; e++, place++) squares.add_at(place, single(x[high + e]));
    }
    for (int i = threadIdx.x; i < rest; i += blockDim.x) {
      const int at = 2 * a.half + i * each;
      for (int e = 0; e < each; e++, place++) squares.add_at(place, single(x[at + e]));
    }
    const float scale = inverse_root(a, sum_of_lanes(squares.sum(), blockDim.x));
    const void* weight = is_query ? a.query_weight : a.key_weight;
    const int type = is_query ? a.query_weight_type : a.key_weight_type;
    auto value = [&](int at) {
      return normed(single(x[at]), scale, read_as(type, weight, at));
    };
    const int64_t position = units ? position_of(a.angles, token) : -1;
    const int64_t angle = position * a.angles.cache_stride;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      for (int e = 0; e < each; e++) {
        const int pair = unit * each + e;
        const int low = is_neox ? pair : 2 * pair, high = is_neox ? a.half + pair : 2 * pair + 1;
        float cosine = __uint_as_float(0x7fffffffu), sine = cosine;
        if (position >= 0) {
          cosine = rounded<T>(read_as(a.angles.cache_type, a.angles.cache, angle + pair));
          sine = rounded<T>(read_as(a.angles.cache_type, a.angles.cache, angle + a.half + pair));
        }
        const Pair p = turned(value(low), value(high), cosine, sine);
        write(x + low, p.low);
        write(x + high, p.high);
      }
    }
    for (int i = threadIdx.x; i < rest; i += blockDim.x) {
      const int at = 2 * a.half + i * each;
      for (int e = 0; e < each; e++) write(x + at + e, value(at + e));
    }
  }
}

bool takes_vectors(const NormRotary& a, const Cut& cut, int lanes) {
  constexpr int64_t most = int64_t{1} << 31;
  return cut.each == lanes && cut.units <= cut.lanes && cut.rest <= 2 * cut.lanes &&
         is_aligned(a.qkv) && a.token_stride % lanes == 0 && is_aligned(a.query_weight) &&
         is_aligned(a.key_weight) && angles_are_aligned(a.angles, a.half, lanes) &&
         a.tokens <= kMaxRows && a.token_stride < most && a.tokens * a.token_stride < most;
}

// Beside what `takes_vectors` asks: 32 bits number the angles too.
bool has_whole_heads(const NormRotary& a, const Cut& cut) {
  constexpr int64_t most = int64_t{1} << 31;
  return cut.rest == 0 && cut.units == cut.lanes && a.query_weight_type == a.type &&
         a.key_weight_type == a.type && a.angles.cache_type == a.type &&
         a.angles.positions_are_64_bit && a.angles.cache_rows > 0 &&
         a.angles.cache_rows * a.angles.cache_stride < most;
}

template <class T, bool is_neox, int lanes>
gpuError launch_lanes(const NormRotary& a, dim3 grid, dim3 block, gpuStream stream) {
  return launch(norm_rotary_of_whole_heads<T, is_neox, lanes>, grid, block, stream,
                launches_depend(), a);
}

template <class T, bool is_neox>
gpuError launch_style(const NormRotary& a, gpuStream stream) {
  constexpr int64_t most = 65535;
  const Cut cut = cut_of(a.head_size, a.half, kLanes<T>);
  const bool vectors = takes_vectors(a, cut, kLanes<T>);
  const int64_t all = static_cast<int64_t>(a.query_heads) + a.key_heads;
  const dim3 block(cut.lanes, fused_rows(cut.lanes, all, a.tokens));
  const int64_t high = a.tokens < most ? a.tokens : most, deep = divided_up(a.tokens, high);
  const dim3 grid(static_cast<unsigned>(divided_up(all, block.y)), static_cast<unsigned>(high),
                  static_cast<unsigned>(deep < most ? deep : most));
  if (!vectors) {
    return launch(norm_rotary_of_pairs<T, is_neox>, grid, block, stream, launches_depend(), a,
                  cut);
  }
  switch (has_whole_heads(a, cut) ? cut.lanes : 0) {
    case 4:
      return launch_lanes<T, is_neox, 4>(a, grid, block, stream);
    case 8:
      return launch_lanes<T, is_neox, 8>(a, grid, block, stream);
    case 16:
      return launch_lanes<T, is_neox, 16>(a, grid, block, stream);
    default:
      return launch(norm_rotary_of_vectors<T, is_neox>, grid, block, stream, launches_depend(), a,
                    cut);
  }
}

template <class T>
gpuError launch_type(const NormRotary& a, gpuStream stream) {
  return a.is_neox ? launch_style<T, true>(a, stream) : launch_style<T, false>(a, stream);
}

}  // namespace

gpuError launch_norm_rotary(const NormRotary& a, gpuStream stream) {
  return a.type == kFloat32    ? launch_type<float>(a, stream)
         : a.type == kBFloat16 ? launch_type<BFloat16>(a, stream)
                               : launch_type<Float16>(a, stream);
}

}  // namespace vllm_fl
