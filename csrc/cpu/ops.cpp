// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <cstring>

#include "../refusals.h"
#include "kernels.h"

namespace vllm_fl {
namespace {

// What one thread does at least, in elements: a parallel region costs 2 to 10 us, in which a
// thread norms or gates as many. Decode steps stay below it, and so never need a thread: after
// a fork there is none.
constexpr int64_t kGrain = 32768;

const Kernels& best_kernels() {
#if defined(VLLM_FL_X86)
  const std::string capability = at::get_cpu_capability();
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && capability == "AVX512") return kernels_avx512;
  if (avx2 && (capability == "AVX512" || capability == "AVX2")) return kernels_avx2;
#endif
  return kernels_default;
}

const Kernels& kernels() {
  static const Kernels& chosen = best_kernels();
  return chosen;
}

template <class Arguments>
void run(Kernel<Arguments> kernel, const Arguments& arguments, int64_t rows, int64_t row_size) {
  if (rows * row_size <= kGrain) {
    kernel(arguments, 0, rows);
    return;
  }
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_size)),
                   [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

// A vector, or the rows of a matrix, whose last stride is 1, in memory of their own.
TensorBase copy_of(const TensorBase& x) {
  TensorBase copy = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  const bool is_matrix = x.dim() == 2;
  const size_t row = x.size(-1) * x.element_size();
  const char* from = static_cast<const char*>(data_of(x));
  char* to = static_cast<char*>(copy.mutable_data_ptr());
  for (int64_t r = 0; r < (is_matrix ? x.size(0) : 1); r++, to += row) {
    std::memcpy(to, is_matrix ? from + r * x.stride(0) * x.element_size() : from, row);
  }
  return copy;
}

// What is read, or a copy where it shares memory with what is written.
TensorBase apart_from(const TensorBase& read, const TensorBase& written) {
  return overlap(read, written) ? copy_of(read) : read;
}

Norm norm_of(const TensorBase& x, Maybe weight, double epsilon, Size variance_size,
             double weight_offset) {
  Norm norm{};
  norm.x = data_of(x);
  rows_of(x, norm.x_rows);
  norm.weight = weight == nullptr ? nullptr : data_of(*weight);
  norm.hidden = x.size(-1);
  norm.averaged = variance_size.value_or(norm.hidden);
  norm.epsilon = static_cast<float>(epsilon);
  norm.weight_offset = static_cast<float>(weight_offset);
  return norm;
}

void run_norm(const Norm& norm, const TensorBase& x, Maybe weight) {
  const int type = type_index(x.scalar_type());
  const int of_weight = weight == nullptr ? type : type_index(weight->scalar_type());
  run(kernels().norm[type][of_weight], norm, x.numel() / norm.hidden, norm.hidden);
}

Rows contiguous_rows(int64_t rows, int64_t width) {
  Rows r;
  r.dims = 1;
  r.sizes[0] = rows;
  r.strides[0] = width;
  return r;
}

}  // namespace

c10::Device home_of(const TensorBase&) { return c10::Device(c10::DeviceType::CPU); }

const char* cpu_capability() { return kernels().name; }

// --------------------------------------------------------------------------------- operators

TensorBase gated(Activation activation, const TensorBase& x) {
  raise_if("a gated activation", gated_refusal(x));
  c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
  const int64_t width = shape.back() /= 2;
  TensorBase out = at::detail::empty_cpu(shape, x.scalar_type());
  if (!out.numel()) return out;
  Gated arguments{data_of(x), out.mutable_data_ptr(), {}, width,
                  activation == Activation::kSiluLast};
  rows_of(x, arguments.rows);
  const auto& kernel = activation == Activation::kGeluErf    ? kernels().gelu_erf
                       : activation == Activation::kGeluTanh ? kernels().gelu_tanh
                                                             : kernels().silu;
  run(kernel[type_index(x.scalar_type())], arguments, out.numel() / width, width);
  return out;
}

TensorBase rms_norm(const TensorBase& x, Maybe weight, double epsilon, Size variance_size,
                    double weight_offset) {
  raise_if("rms_norm", rms_norm_refusal(x, weight, variance_size));
  TensorBase out = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  if (!out.numel()) return out;
  Norm norm = norm_of(x, weight, epsilon, variance_size, weight_offset);
  norm.out = out.mutable_data_ptr();
  norm.out_rows = contiguous_rows(x.numel() / norm.hidden, norm.hidden);
  run_norm(norm, x, weight);
  return out;
}

std::pair<TensorBase, TensorBase> fused_add_rms_norm(const TensorBase& x,
                                                     const TensorBase& residual, Maybe weight,
                                                     double epsilon, Size variance_size,
                                                     double weight_offset) {
  raise_if("fused_add_rms_norm",
           fused_add_rms_norm_refusal(x, residual, weight, variance_size));
  if (!x.numel()) return {x, residual};
  Norm norm = norm_of(x, weight, epsilon, variance_size, weight_offset);
  norm.residual = data_of(residual);
  rows_of(residual, norm.residual_rows);
  std::pair<TensorBase, TensorBase> results{x, residual};
  if (overlap(x, residual) ||
      (weight != nullptr && (overlap(*weight, x) || overlap(*weight, residual)))) {
    results = {at::detail::empty_cpu(x.sizes(), x.scalar_type()),
               at::detail::empty_cpu(x.sizes(), x.scalar_type())};
    norm.out = results.first.mutable_data_ptr();
    norm.total = results.second.mutable_data_ptr();
    norm.out_rows = norm.total_rows = contiguous_rows(x.numel() / norm.hidden, norm.hidden);
  } else {
    norm.out = written_data_of(x);
    norm.total = written_data_of(residual);
    norm.out_rows = norm.x_rows;
    norm.total_rows = norm.residual_rows;
  }
  run_norm(norm, x, weight);
  return results;
}

namespace {

using Positions = c10::SmallVector<int64_t, 64>;

// Copies, so that what was checked is what is used. To be called before anything is written.
Positions checked_positions(const char* op, const TensorBase& positions,
                            const TensorBase& cos_sin_cache) {
  const int64_t tokens = positions.numel(), known = cos_sin_cache.size(0);
  const void* given = data_of(positions);
  const bool are_64_bit = positions.scalar_type() == at::kLong;
  Positions checked(tokens);
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t position = are_64_bit ? static_cast<const int64_t*>(given)[token]
                                        : static_cast<const int32_t*>(given)[token];
    checked[token] = position;
    TORCH_CHECK_INDEX(position >= 0 && position < known, op, ": position ", position,
                      " of token ", token, " is not within the cache's ", known);
  }
  return checked;
}

Turned turned_of(const TensorBase& x, int64_t tokens, int64_t head_size) {
  Turned turned{};
  if (!x.numel()) return turned;
  turned.data = written_data_of(x);
  rows_of(x, turned.rows);
  turned.rows_per_token = x.numel() / x.size(-1) / tokens;
  turned.heads_per_row = x.size(-1) / head_size;
  return turned;
}

}  // namespace

void rotary_embedding(const TensorBase& positions, const TensorBase& query, Maybe key,
                      int64_t head_size, const TensorBase& cos_sin_cache, bool is_neox) {
  raise_if("rotary_embedding",
           rotary_embedding_refusal(positions, query, key, head_size, cos_sin_cache));
  const int64_t tokens = positions.numel(), rotary_dim = cos_sin_cache.size(1);
  if (!tokens || !rotary_dim) return;
  Rotary rotary{};
  const TensorBase cache = overlap(cos_sin_cache, query) || (key && overlap(cos_sin_cache, *key))
                               ? copy_of(cos_sin_cache)
                               : cos_sin_cache;
  rotary.cache = data_of(cache);
  rotary.cache_stride = cache.stride(0);
  rotary.half = rotary_dim / 2;
  rotary.head_size = head_size;
  rotary.is_neox = is_neox;
  const Positions checked = checked_positions("rotary_embedding", positions, cos_sin_cache);
  rotary.positions = checked.data();
  rotary.turned[0] = turned_of(query, tokens, head_size);
  const bool same = key != nullptr && key->is_same(query);
  if (key != nullptr && !same) rotary.turned[1] = turned_of(*key, tokens, head_size);
  int64_t per_token = query.numel() / tokens + (key == nullptr ? 0 : key->numel() / tokens);
  run(kernels().rotary[type_index(query.scalar_type())][type_index(cos_sin_cache.scalar_type())],
      rotary, tokens, per_token);
}

std::string fused_qk_norm_rope_refusal(const TensorBase& qkv, const HeadCounts& heads,
                                       int64_t head_dim, const TensorBase& q_weight,
                                       const TensorBase& k_weight,
                                       const TensorBase& cos_sin_cache,
                                       const TensorBase& position_ids) {
  VLLM_FL_RETURN_REFUSAL(norm_rope_refusal(qkv, heads, head_dim, q_weight, k_weight,
                                           cos_sin_cache, position_ids));
  if (q_weight.scalar_type() != qkv.scalar_type() && q_weight.scalar_type() != at::kFloat) {
    return text("q_weight is ", q_weight.dtype(), ", qkv is ", qkv.dtype());
  }
  if (k_weight.scalar_type() != q_weight.scalar_type()) {
    return text("q_weight is ", q_weight.dtype(), ", k_weight is ", k_weight.dtype());
  }
  if (cos_sin_cache.scalar_type() != qkv.scalar_type()) {
    return text("cos_sin_cache is ", cos_sin_cache.dtype(), ", qkv is ", qkv.dtype());
  }
  return {};
}

void fused_qk_norm_rope(const TensorBase& qkv, const HeadCounts& heads, int64_t head_dim,
                        double eps, const TensorBase& q_weight, const TensorBase& k_weight,
                        const TensorBase& cos_sin_cache, bool is_neox,
                        const TensorBase& position_ids) {
  constexpr const char* op = "fused_qk_norm_rope";
  raise_if(op, fused_qk_norm_rope_refusal(qkv, heads, head_dim, q_weight, k_weight, cos_sin_cache,
                                          position_ids));
  if (!qkv.numel()) return;
  const Positions checked = checked_positions(op, position_ids, cos_sin_cache);
  const TensorBase of_query = apart_from(q_weight, qkv), of_key = apart_from(k_weight, qkv);
  const TensorBase cache = apart_from(cos_sin_cache, qkv);
  QkNormRope arguments{};
  rows_of(qkv, arguments.rows);
  arguments.q_weight = data_of(of_query);
  arguments.k_weight = data_of(of_key);
  arguments.q_heads = heads.query;
  arguments.k_heads = heads.key;
  arguments.head_dim = head_dim;
  arguments.epsilon = static_cast<float>(eps);
  arguments.positions = checked.data();
  arguments.cache = data_of(cache);
  arguments.cache_stride = cache.stride(0);
  arguments.half = cos_sin_cache.size(1) / 2;
  arguments.is_neox = is_neox;
  arguments.qkv = written_data_of(qkv);
  const int type = type_index(qkv.scalar_type());
  const bool wider = q_weight.scalar_type() != qkv.scalar_type();
  run(kernels().qk_norm_rope[type][wider], arguments, qkv.size(0),
      (heads.query + heads.key) * head_dim);
}

}  // namespace vllm_fl
