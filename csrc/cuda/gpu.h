// SPDX-License-Identifier: Apache-2.0
// The runtime's few names that the kernels need, for CUDA and for HIP, and what they are made of:
// numbers of 16 and 32 bits, vectors of 16 bytes, sums over threads, launches.
//
// A "warp" is 32 lanes everywhere. Where hardware has waves of 64, it holds two of them: lanes are
// only ever exchanged with those less than 32 away.
#pragma once

#if defined(__HIP_PLATFORM_AMD__)
#include <hip/hip_runtime.h>
#define VLLM_FL_HIP 1
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define VLLM_FL_HIP 0
#endif

#include <atomic>

#include "../rows.h"  // behind the runtime, which defines __host__ and __device__

namespace vllm_fl {

#if VLLM_FL_HIP
using gpuStream = hipStream_t;
using gpuError = hipError_t;
constexpr gpuError kSuccess = hipSuccess;
#else
using gpuStream = cudaStream_t;
using gpuError = cudaError_t;
constexpr gpuError kSuccess = cudaSuccess;
#endif

// A parameter that is indexed at run time stays where it is, and no thread copies it.
#if VLLM_FL_HIP
#define VLLM_FL_IN_PLACE const
#else
#define VLLM_FL_IN_PLACE const __grid_constant__
#endif

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block
constexpr int64_t kMaxRows = 0x7fffffff;  // that 32 bits number, as `Divider` wants it

// What a tensor holds; only the bits, never arithmetic.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr Type value = kFloat32;
};
template <>
struct TypeOf<BFloat16> {
  static constexpr Type value = kBFloat16;
};
template <>
struct TypeOf<Float16> {
  static constexpr Type value = kFloat16;
};

// Division of numbers below 2^31 by one that is known before the launch.
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    while (shift < 31 && (1u << shift) < d) shift++;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }

#if defined(__CUDACC__) || defined(__HIPCC__)
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return (__umulhi(n, magic) + n) >> shift;
  }
#endif
};

// Strides, in elements, of a tensor whose rows have at most two dimensions.
struct Strides {
  int64_t outer = 0, inner = 0;
};

#if defined(__CUDACC__) || defined(__HIPCC__)

// ------------------------------------------------------------------------------------ numbers

__device__ __forceinline__ float single(float x) { return x; }
__device__ __forceinline__ float single(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

#if VLLM_FL_HIP

__device__ __forceinline__ float single(Float16 x) {
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
}
__device__ __forceinline__ uint32_t bits_of(float x, BFloat16) {
  uint32_t u = __float_as_uint(x);
  return x != x ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // ties to even
}
__device__ __forceinline__ uint32_t bits_of(float x, Float16) {
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
}
template <class T>
__device__ __forceinline__ uint32_t bits_of_two(float x, float y, T kind) {
  return bits_of(x, kind) | bits_of(y, kind) << 16;
}
__device__ __forceinline__ float exchanged(float x, int distance) {
  return __shfl_xor(x, distance);
}

#else

__device__ __forceinline__ float single(Float16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ uint32_t bits_of(float x, BFloat16) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint32_t bits_of(float x, Float16) {
  return __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ uint32_t bits_of_two(float x, float y, BFloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t bits_of_two(float x, float y, Float16) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ float exchanged(float x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}

#endif

__device__ __forceinline__ void write(float* to, float x) { *to = x; }
template <class T>
__device__ __forceinline__ void write(T* to, float x) {
  to->bits = static_cast<uint16_t>(bits_of(x, T{}));
}

// The value that is left in T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (Same<T, float>::value) {
    return x;
  } else {
    return single(T{static_cast<uint16_t>(bits_of(x, T{}))});
  }
}

__device__ __forceinline__ float read_as(int type, const void* from, int64_t at) {
  return type == kFloat32    ? static_cast<const float*>(from)[at]
         : type == kBFloat16 ? single(static_cast<const BFloat16*>(from)[at])
                             : single(static_cast<const Float16*>(from)[at]);
}

// ------------------------------------------------------------------------------------ vectors

// Elements of 16 bytes.
template <class T>
constexpr int kLanes = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ uint4 load(const void* from) {
  return *static_cast<const uint4*>(from);
}
__device__ __forceinline__ void store(void* to, uint4 v) { *static_cast<uint4*>(to) = v; }

template <class T>
__device__ __forceinline__ void unpack(uint4 v, float (&x)[kLanes<T>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  if constexpr (Same<T, float>::value) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = single(T{static_cast<uint16_t>(words[i] & 0xffffu)});
      if constexpr (Same<T, BFloat16>::value) {
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        x[2 * i + 1] = single(T{static_cast<uint16_t>(words[i] >> 16)});
      }
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 packed(const float (&x)[kLanes<T>]) {
  if constexpr (Same<T, float>::value) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  } else {
    return make_uint4(bits_of_two(x[0], x[1], T{}), bits_of_two(x[2], x[3], T{}),
                      bits_of_two(x[4], x[5], T{}), bits_of_two(x[6], x[7], T{}));
  }
}

// Elements from `at` on of an array of a type that is known at run time, at a vector's address.
template <int count>
__device__ __forceinline__ void read_all(int type, const void* from, int64_t at,
                                         float (&x)[count]) {
  if (type == kFloat32) {
    const float* f = static_cast<const float*>(from) + at;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const uint4 v = load(f + i);
      x[i] = __uint_as_float(v.x);
      x[i + 1] = __uint_as_float(v.y);
      x[i + 2] = __uint_as_float(v.z);
      x[i + 3] = __uint_as_float(v.w);
    }
  } else {
    const uint16_t* h = static_cast<const uint16_t*>(from) + at;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(h + i);
      const uint32_t words[2] = {v.x, v.y};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint16_t bits = static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
        x[i + k] = type == kBFloat16 ? single(BFloat16{bits}) : single(Float16{bits});
      }
    }
  }
}

// -------------------------------------------------------------------------------------- sums

// Squares, in an order that does not depend on how they were read: to four partial sums by turns.
struct Squares {
  float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  // i: known when compiled.
  __device__ __forceinline__ void add(int i, float x) { part[i & 3] = fmaf(x, x, part[i & 3]); }
  __device__ __forceinline__ void add_at(int i, float x) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if ((i & 3) == k) add(k, x);
    }
  }
  __device__ __forceinline__ float sum() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

// Over `lanes` neighbouring lanes, a power of two up to 32; every lane of the warp must be here.
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) {
    if (distance < lanes) x += exchanged(x, distance);
  }
  return x;
}

// Loads above are asked for before loads below. Else NVIDIA's assembler asks first for the address
// that later loads wait for, and its use holds up those that wait for nothing.
__device__ __forceinline__ void loads_so_far() {
#if !VLLM_FL_HIP
  __syncwarp();
#endif
}

// What was made of this number above is made anew below, and takes no register between.
__device__ __forceinline__ void forget([[maybe_unused]] uint32_t& n) {
#if !VLLM_FL_HIP
  asm volatile("" : "+r"(n));
#endif
}

// ------------------------------------------------------------------------ launches in a chain

// With programmatic dependent launch a grid may be started while the one before it still runs;
// nothing of it may be read or overwritten before this.
__device__ __forceinline__ void await_previous_grid() {
#if !VLLM_FL_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

// Whether kernels for the present device have the instruction above: asked of one of them, once for
// each device.
template <class Kernel>
bool knows_dependent_launch([[maybe_unused]] Kernel kernel) {
#if VLLM_FL_HIP
  return false;
#else
  constexpr int devices = 64;
  static std::atomic<signed char> answers[devices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= devices) return false;
  signed char answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    answer = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90 ? 1 : -1;
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer > 0;
#endif
}

template <class... Parameters>
gpuError launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, gpuStream stream,
                [[maybe_unused]] bool dependent, Parameters... arguments) {
#if VLLM_FL_HIP
  hipLaunchKernelGGL(kernel, grid, block, 0, stream, arguments...);
  return hipGetLastError();
#else
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  if (dependent) {
    config.numAttrs = knows_dependent_launch(kernel) ? 1 : 0;
  }
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers);
#endif
}

#endif  // compiled for a device

inline int64_t divided_up(int64_t n, int64_t d) { return (n + d - 1) / d; }

inline int power_of_two_from(int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

}  // namespace vllm_fl
