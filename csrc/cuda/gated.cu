// SPDX-License-Identifier: Apache-2.0
// Gated activations: act(gate) * up, computed in float32 and rounded once.
#include <type_traits>

#include "kernels.h"
#include "tuning.h"

namespace vllm_fl {
namespace {

// 1 / (1 + exp(-s)) for a result that is rounded to half precision: two instructions of the special
// function unit. The relative error, |s| * 2^-23, stays below a hundredth of a float16's last place
// where the result is not zero in it, and of a bfloat16's down to s = -87.3. Below, where the exact
// one is less than 2^-126, it is 0.
__device__ __forceinline__ float rough_sigmoid(float s) {
#if VLLM_FL_HIP
  return __fdividef(1.0f, 1.0f + __expf(-s));
#else
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(s * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
#endif
}

// x * sigmoid(s). NaN for x = s = -inf, as in PyTorch.
template <class T>
__device__ __forceinline__ float times_sigmoid(float x, float s) {
  if constexpr (Same<T, float>::value) {
    return x / (1.0f + expf(-s));
  } else {
    return x * rough_sigmoid(s);
  }
}

template <Gate gate, class T>
__device__ __forceinline__ float activated(float x) {
  if constexpr (gate == Gate::kSilu) {
    return times_sigmoid<T>(x, x);
  } else if constexpr (gate == Gate::kGeluTanh) {
    // (1 + tanh(u)) / 2 is the sigmoid of 2 * u.
    const float u = x * fmaf(x * x, 0.044715f, 1.0f);
    return times_sigmoid<T>(x, u * 1.5957691216057308f);  // 2 * sqrt(2 / pi)
  } else {
    return x * 0.5f * (1.0f + erff(x * 0.70710678118654752f));
  }
}

__device__ __forceinline__ int64_t row_of_grid() {
  return (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
}

__device__ __forceinline__ int64_t place_of(const Gated& a, int64_t row) {
  if (a.inner.divisor == 1) return row * a.strides.outer;
  const uint32_t outer = a.inner.quotient(static_cast<uint32_t>(row));
  const uint32_t inner = static_cast<uint32_t>(row) - outer * a.inner.divisor;
  return outer * a.strides.outer + inner * a.strides.inner;
}

// flat: a block has the threads of one row, the rows have one dimension, and 32 bits number the
// elements.
template <Gate gate, class T, bool flat>
__global__ void __launch_bounds__(512) gated_vectors(const Gated a) {
  constexpr int each = kLanes<T>;
  using Index = std::conditional_t<flat, uint32_t, int64_t>;
  const Index row = flat ? blockIdx.z * gridDim.y + blockIdx.y : row_of_grid();
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= static_cast<Index>(a.rows) || i >= static_cast<unsigned>(a.width) / each) return;
  const Index place = flat ? row * static_cast<Index>(a.strides.outer) : place_of(a, row);
  const Index target = row * static_cast<Index>(a.width);
  await_previous_grid();
  const uint4 gates = load(static_cast<const T*>(a.gate) + (place + i * each));
  const uint4 ups = load(static_cast<const T*>(a.up) + (place + i * each));
  float x[each], up[each];
  unpack<T>(gates, x);
  unpack<T>(ups, up);
#pragma unroll
  for (int e = 0; e < each; e++) x[e] = activated<gate, T>(x[e]) * up[e];
  store(static_cast<T*>(a.out) + (target + i * each), packed<T>(x));
}

template <Gate gate, class T>
__global__ void __launch_bounds__(256, 1)
    gated_elements(const Gated a, VLLM_FL_IN_PLACE Rows rows) {
  await_previous_grid();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t rows_at_once = static_cast<int64_t>(gridDim.y) * gridDim.z * blockDim.y;
  for (int64_t row = row_of_grid(); row < a.rows; row += rows_at_once) {
    const int64_t place = rows.offset(row);
    const T* gates = static_cast<const T*>(a.gate) + place;
    const T* ups = static_cast<const T*>(a.up) + place;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.width;
         i += step) {
      write(out + i, activated<gate, T>(single(gates[i])) * single(ups[i]));
    }
  }
}

// Blocks of rows over the grid's y and z, which have 16 bits each.
bool rows_of_grid(int64_t blocks, dim3& grid) {
  constexpr int64_t most = 65535;
  grid.y = static_cast<unsigned>(blocks < most ? blocks : most);
  const int64_t deep = divided_up(blocks, grid.y);
  grid.z = static_cast<unsigned>(deep < most ? deep : most);
  return deep <= most;
}

bool takes_vectors(const Gated& a, int lanes) {
  if (!a.is_simple || a.rows > kMaxRows || a.width % lanes) return false;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(a.gate) |
                              reinterpret_cast<uintptr_t>(a.up) |
                              reinterpret_cast<uintptr_t>(a.out);
  return addresses % 16 == 0 && a.strides.outer % lanes == 0 && a.strides.inner % lanes == 0;
}

template <Gate gate, class T>
gpuError launch_type(const Gated& a, const Rows& rows, gpuStream stream) {
  dim3 grid;
  if (takes_vectors(a, kLanes<T>)) {
    const int64_t vectors = a.width / kLanes<T>;
    const GatedLaunch how = gated_launch(vectors, a.rows);
    const int64_t chunks = divided_up(vectors, how.columns);
    if (rows_of_grid(divided_up(a.rows, how.rows), grid) && chunks <= kMaxRows) {
      grid.x = static_cast<unsigned>(chunks);
      const dim3 block(how.columns, how.rows);
      constexpr int64_t most = int64_t{1} << 31;
      const bool flat = how.rows == 1 && a.inner.divisor == 1 && a.strides.outer < most &&
                        a.rows * a.strides.outer < most && a.rows * a.width < most;
      return flat ? launch(gated_vectors<gate, T, true>, grid, block, stream, launches_depend(), a)
                  : launch(gated_vectors<gate, T, false>, grid, block, stream, launches_depend(),
                           a);
    }
  }
  const int columns = a.width < 128 ? power_of_two_from(a.width) : 128;
  const dim3 block(columns, 128 / columns);
  const int64_t chunks = divided_up(a.width, columns);
  grid.x = static_cast<unsigned>(chunks < 65536 ? chunks : 65536);
  rows_of_grid(divided_up(a.rows, block.y), grid);
  return launch(gated_elements<gate, T>, grid, block, stream, launches_depend(), a, rows);
}

template <Gate gate>
gpuError launch_gate(const Gated& a, const Rows& rows, gpuStream stream) {
  return a.type == kFloat32    ? launch_type<gate, float>(a, rows, stream)
         : a.type == kBFloat16 ? launch_type<gate, BFloat16>(a, rows, stream)
                               : launch_type<gate, Float16>(a, rows, stream);
}

}  // namespace

gpuError launch_gated(Gate gate, const Gated& a, const Rows& rows, gpuStream stream) {
  return gate == Gate::kSilu      ? launch_gate<Gate::kSilu>(a, rows, stream)
         : gate == Gate::kGeluErf ? launch_gate<Gate::kGeluErf>(a, rows, stream)
                                  : launch_gate<Gate::kGeluTanh>(a, rows, stream);
}

}  // namespace vllm_fl
