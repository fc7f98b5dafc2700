// SPDX-License-Identifier: Apache-2.0
// What the kernels are given, and the functions that launch them. Plain addresses and sizes: no
// header of torch is needed here or in any .cu file.
//
// Each function launches on the stream that it is given, waits for nothing, allocates nothing,
// and returns the runtime's error. Sizes are checked by the caller (refusals.h, operators.h);
// there are rows and tokens, or there is no launch.
//
// Where rows have at most two dimensions, as nearly always, they are given by strides, and `Rows`
// stays with the caller: what a launch has to copy delays it.
#pragma once

#include "gpu.h"

namespace vllm_fl {

// ------------------------------------------------------------------------------- activations

enum class Gate { kSilu, kGeluErf, kGeluTanh };

struct Gated {
  const void* gate;  // the first row's first gate, and what it is multiplied with
  const void* up;
  void* out;  // contiguous
  int64_t rows;
  int64_t width;       // elements of a row of `out`
  bool is_simple;      // the rows have at most two dimensions: `inner`, `strides`
  Divider inner;       // the size of the last of them
  Strides strides;     // of gate and up
  int type;
};

gpuError launch_gated(Gate gate, const Gated& arguments, const Rows& rows, gpuStream stream);

// -------------------------------------------------------------------------------------- norms

struct Norm {
  const void* x;
  const void* residual;  // null: no addition
  const void* weight;    // null: none
  void* out;
  void* total;  // x + residual
  int64_t rows;
  int hidden;
  int averaged;      // the first elements of a row, whose squares are averaged
  float of_average;  // 1 / averaged
  float epsilon;
  float weight_offset;  // added to the weight: 0, or 1 in Gemma's form
  int type, weight_type;
  bool is_simple;  // the rows have at most two dimensions, the same ones in all tensors
  Divider inner;   // the size of the last of them
  Strides x_strides, residual_strides, out_strides, total_strides;
};

struct NormRows {
  Rows x, residual, out, total;
};

gpuError launch_norm(const Norm& arguments, const NormRows& rows, gpuStream stream);

// ------------------------------------------------------------------------------------- rotary

struct Heads {  // of query or key
  void* data;   // null: absent
  int64_t heads;
  int64_t token_stride, head_stride;
};

struct HeadRows {
  Rows rows;
  int64_t rows_per_token, heads_per_row;
};

struct Angles {
  const void* positions;
  bool positions_are_64_bit;
  const void* cache;  // rows of half cosines, then half sines
  int64_t cache_rows, cache_stride;
  int cache_type;
};

// A position that is not within the cache makes its token's turned elements NaN.
struct Rotary {
  Angles angles;
  Heads turned[2];
  int64_t tokens;
  int half, head_size;
  int type;
  bool is_neox;
  bool is_simple;  // the heads lie at even distances
};

struct RotaryRows {
  HeadRows turned[2];
};

gpuError launch_rotary(const Rotary& arguments, const RotaryRows& rows, gpuStream stream);

// ---------------------------------------------------------------- norm of heads, then rotary

struct NormRotary {
  Angles angles;
  void* qkv;
  int64_t tokens, token_stride;
  int query_heads, key_heads;  // one behind the other
  int head_size, half;
  float of_average;  // 1 / head_size
  float epsilon;
  const void* query_weight;
  const void* key_weight;
  int query_weight_type, key_weight_type;
  int type;
  bool is_neox;
};

gpuError launch_norm_rotary(const NormRotary& arguments, gpuStream stream);

// -------------------------------------------------------------------------------------- cache

struct CachedSide {  // of keys or values; strides in elements
  const void* rows;
  void* cache;
  int64_t token_stride, head_stride;
  int64_t block_stride, slot_stride, cache_head_stride;
};

// A slot that is negative or not within the cache is left out.
struct CacheWrite {
  CachedSide sides[2];
  const void* slots;
  bool slots_are_64_bit;
  int64_t tokens, heads, head_size;
  int64_t blocks, block_size;
  int element_size;
};

gpuError launch_cache_write(const CacheWrite& arguments, gpuStream stream);

}  // namespace vllm_fl
