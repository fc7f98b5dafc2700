// SPDX-License-Identifier: Apache-2.0
// The operators on tensors. For each, `<op>_refusal` says why arguments cannot be taken, or
// nothing; the operator raises with the same words. Where it says nothing the operator is defined,
// for all tensors that have data: a fake one has none, and raises.
#pragma once

#include <ATen/core/TensorBase.h>

#include <optional>
#include <string>
#include <utility>

namespace vllm_fl {

using at::TensorBase;

// A tensor that may be absent, borrowed.
using Maybe = const TensorBase*;
using Size = std::optional<int64_t>;

enum class Activation { kSilu, kGeluErf, kGeluTanh, kSiluLast };

// x: (..., 2 * d) -> (..., d), contiguous. kSiluLast: the gate is the second half of a row.
std::string gated_refusal(const TensorBase& x);
TensorBase gated(Activation activation, const TensorBase& x);

// x: (..., hidden) -> the same, contiguous. Rows may lie anywhere; the last stride is 1.
// weight_offset: 0, or 1 where the weight is stored less one (Gemma).
std::string rms_norm_refusal(const TensorBase& x, Maybe weight, Size variance_size);
TensorBase rms_norm(const TensorBase& x, Maybe weight, double epsilon, Size variance_size,
                    double weight_offset);

// In place: x becomes the norm of x + residual, residual the sum, and both are returned. Where
// they overlap, or the weight lies in one of them, they stay and new tensors are returned.
std::string fused_add_rms_norm_refusal(const TensorBase& x, const TensorBase& residual,
                                       Maybe weight, Size variance_size);
std::pair<TensorBase, TensorBase> fused_add_rms_norm(const TensorBase& x,
                                                     const TensorBase& residual, Maybe weight,
                                                     double epsilon, Size variance_size,
                                                     double weight_offset);

// In place on query and key, which may be one tensor: that is turned once.
// positions: int32 or int64, one for each token; query, key: reshapeable to (tokens, heads,
// head_size) with heads whole in each row; cos_sin_cache: (positions, rotary_dim).
std::string rotary_embedding_refusal(const TensorBase& positions, const TensorBase& query,
                                     Maybe key, int64_t head_size,
                                     const TensorBase& cos_sin_cache);
void rotary_embedding(const TensorBase& positions, const TensorBase& query, Maybe key,
                      int64_t head_size, const TensorBase& cos_sin_cache, bool is_neox);

struct HeadCounts {
  int64_t query, key, value;
};

// In place on qkv: (tokens, all heads * head_dim), its last stride 1. Each head of query and key
// becomes its norm times a weight (head_dim), and its first rotary_dim channels are rotated;
// cos_sin_cache: (positions, rotary_dim); position_ids: int32 or int64, (tokens).
std::string fused_qk_norm_rope_refusal(const TensorBase& qkv, const HeadCounts& heads,
                                       int64_t head_dim, const TensorBase& q_weight,
                                       const TensorBase& k_weight,
                                       const TensorBase& cos_sin_cache,
                                       const TensorBase& position_ids);
void fused_qk_norm_rope(const TensorBase& qkv, const HeadCounts& heads, int64_t head_dim,
                        double eps, const TensorBase& q_weight, const TensorBase& k_weight,
                        const TensorBase& cos_sin_cache, bool is_neox,
                        const TensorBase& position_ids);

}  // namespace vllm_fl
