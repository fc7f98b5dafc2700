// SPDX-License-Identifier: Apache-2.0
// What a kernel is given, and the table of kernels that each instruction set has.
#pragma once

#include "../rows.h"

namespace vllm_fl {

struct Gated {
  const void* x;  // rows of 2 * width
  void* out;      // rows of width, contiguous
  Rows rows;
  int64_t width;
  bool gate_last;  // the gate is the second half of a row, not the first
};

struct Norm {
  const void* x;
  const void* residual;  // null: no addition
  const void* weight;    // null: none
  void* out;
  void* total;  // x + residual
  Rows x_rows, residual_rows, out_rows, total_rows;
  int64_t hidden;
  int64_t averaged;  // the first elements of a row, whose squares are averaged
  float epsilon;
  float weight_offset;  // added to the weight: 0, or 1 in Gemma's form
};

struct Turned {  // query or key
  void* data;    // null: absent
  Rows rows;
  int64_t rows_per_token;
  int64_t heads_per_row;
};

struct Rotary {
  const int64_t* positions;  // checked copies: what they came from may be written meanwhile
  const void* cache;  // rows of half cosines, then half sines
  int64_t cache_stride;
  int64_t half;
  int64_t head_size;
  bool is_neox;
  Turned turned[2];
};

struct QkNormRope {
  void* qkv;
  Rows rows;  // one a token: the heads of query, then of key, then others
  const void* q_weight;
  const void* k_weight;
  int64_t q_heads, k_heads;
  int64_t head_dim;
  float epsilon;
  const int64_t* positions;  // as for Rotary
  const void* cache;
  int64_t cache_stride;
  int64_t half;
  bool is_neox;
};

// Of rows, or tokens, from begin to end.
template <class Arguments>
using Kernel = void (*)(const Arguments&, int64_t begin, int64_t end);

struct Kernels {
  const char* name;
  Kernel<Gated> silu[kTypes];
  Kernel<Gated> gelu_erf[kTypes];
  Kernel<Gated> gelu_tanh[kTypes];
  Kernel<Norm> norm[kTypes][kTypes];      // x's type, the weight's
  Kernel<Rotary> rotary[kTypes][kTypes];  // query's and key's type, the cache's
  Kernel<QkNormRope> qk_norm_rope[kTypes][2];  // the weights are of qkv's type, or of float32
};

extern const Kernels kernels_default;
#if defined(VLLM_FL_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace vllm_fl
