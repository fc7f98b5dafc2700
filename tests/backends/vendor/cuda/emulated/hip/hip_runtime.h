// SPDX-License-Identifier: Apache-2.0
// As much of HIP as our kernels need, on the CPU: a block's threads are fibers, run one after the
// other from barrier to barrier, blocks one after the other. An exchange between lanes is a barrier
// of the block, which is right for kernels whose warps all exchange as often.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

using hipStream_t = void*;
using hipError_t = int;
constexpr hipError_t hipSuccess = 0, hipErrorInvalidConfiguration = 9;
constexpr int hipDeviceAttributeMultiprocessorCount = 0;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t u) { return __builtin_bit_cast(float, u); }
inline uint32_t __float_as_uint(float f) { return __builtin_bit_cast(uint32_t, f); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline float __expf(float x) { return expf(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdividef(float x, float y) {  // as NVIDIA documents it
  const float size = fabsf(y);
  return size > 0x1p126f && !isinf(size) ? (isinf(x) ? NAN : 0.0f) : x / y;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

namespace emulated {

inline dim3 threadIdx_(0, 0, 0), blockIdx_(0, 0, 0), blockDim_, gridDim_;
inline hipError_t last_error = hipSuccess;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 index;
  bool done = false;
  int barriers = 0;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline size_t current = 0;
inline const std::function<void()>* body = nullptr;
inline std::vector<float> lanes[2];

constexpr size_t kStack = 64 << 10;

inline void run_fiber() {
  (*body)();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void barrier() {
  fibers[current].barriers++;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void run_block(const std::function<void()>& kernel) {
  const size_t count = static_cast<size_t>(blockDim_.x) * blockDim_.y * blockDim_.z;
  body = &kernel;
  if (fibers.size() < count) fibers.resize(count);
  for (auto& side : lanes) side.resize(count);
  for (size_t i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.done = false;
    fiber.barriers = 0;
    fiber.index = dim3(i % blockDim_.x, i / blockDim_.x % blockDim_.y,
                       i / blockDim_.x / blockDim_.y);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    int reached = -1;
    for (current = 0; current < count; current++) {
      if (fibers[current].done) continue;
      threadIdx_ = fibers[current].index;
      swapcontext(&scheduler, &fibers[current].context);
      alive = true;
    }
    for (size_t i = 0; i < count; i++) {
      // A barrier that only some threads reach hangs a GPU.
      if (reached < 0) reached = fibers[i].barriers;
      if (fibers[i].barriers != reached) {
        fprintf(stderr, "emulated: threads of a block have met different barriers\n");
        abort();
      }
    }
  }
}

inline float exchange(float x, int distance) {
  auto& side = lanes[fibers[current].barriers & 1];
  const size_t me = current;
  side[me] = x;
  barrier();
  const size_t other = me ^ static_cast<size_t>(distance);
  if (other >= static_cast<size_t>(blockDim_.x) * blockDim_.y * blockDim_.z) {
    fprintf(stderr, "emulated: an exchange with a lane that is not there\n");
    abort();
  }
  return side[other];
}

template <class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 block, Arguments... arguments) {
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.x > 0x7fffffffu ||
      grid.y > 65535 || grid.z > 65535) {
    last_error = hipErrorInvalidConfiguration;
    return;
  }
  gridDim_ = grid;
  blockDim_ = block;
  const std::function<void()> call = [&] { kernel(arguments...); };
  for (unsigned z = 0; z < grid.z; z++) {
    for (unsigned y = 0; y < grid.y; y++) {
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx_ = dim3(x, y, z);
        run_block(call);
      }
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::threadIdx_
#define blockIdx emulated::blockIdx_
#define blockDim emulated::blockDim_
#define gridDim emulated::gridDim_

inline void __syncthreads() { emulated::barrier(); }
inline float __shfl_xor(float x, int distance) { return emulated::exchange(x, distance); }

#define hipLaunchKernelGGL(kernel, grid, block, shared, stream, ...) \
  ((void)(stream), emulated::launch(kernel, grid, block, __VA_ARGS__))

inline hipError_t hipGetLastError() { return std::exchange(emulated::last_error, hipSuccess); }
inline const char* hipGetErrorString(hipError_t error) {
  return error ? "invalid configuration" : "success";
}
inline hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
inline hipError_t hipDeviceGetAttribute(int* value, int, int) { return *value = 3, hipSuccess; }
