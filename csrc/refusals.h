// SPDX-License-Identifier: Apache-2.0
// What arguments the operators of every device refuse, and why. Metadata only, but for `overlap`,
// `data_of` and `written_data_of`. Included by one file of each extension: it defines the refusals
// that ops.h declares.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <sstream>
#include <string>
#include <utility>

#include "ops.h"
#include "rows.h"

namespace vllm_fl {

// The device on which a tensor, an operator's first, must be to be taken: its own, if that is one
// of the kernels' device. Each extension has its own definition.
c10::Device home_of(const TensorBase& x);

template <class... Parts>
inline std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

inline int type_index(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return kFloat32;
    case c10::ScalarType::BFloat16:
      return kBFloat16;
    case c10::ScalarType::Half:
      return kFloat16;
    default:
      return -1;
  }
}

// Why a tensor is not of a kind that the kernels read, or nothing. Metadata only.
inline std::string kind_refusal(const char* name, const TensorBase& x,
                                const c10::Device& device) {
  if (x.device() != device) return text(name, " is on ", x.device(), ", not on ", device);
  const c10::DispatchKeySet lazy({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
                                  c10::DispatchKey::ZeroTensor, c10::DispatchKey::NestedTensor,
                                  c10::DispatchKey::FuncTorchBatched,
                                  c10::DispatchKey::FuncTorchGradWrapper,
                                  c10::DispatchKey::Functionalize});
  if (x.layout() != at::kStrided || x.key_set().has_any(lazy)) {
    return text(name, " is not a plain strided tensor");
  }
  if (x.requires_grad() && c10::GradMode::is_enabled()) {
    return text("a gradient of ", name, " is required, and the kernels have none");
  }
  if (x._fw_grad(0).defined()) {
    return text(name, " has a forward-mode tangent, and the kernels would lose it");
  }
  return {};
}

inline std::string float_refusal(const char* name, const TensorBase& x,
                                 const c10::Device& device) {
  if (type_index(x.scalar_type()) < 0) {
    return text("dtype ", x.dtype(), " of ", name, " is not float32, bfloat16 or float16");
  }
  return kind_refusal(name, x, device);
}

inline bool rows_are_dense(const TensorBase& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1;
}

// The dimensions but for the last, as few as possible. False: there are too many.
inline bool rows_of(const TensorBase& x, Rows& rows) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t merged_sizes[kMaxDims], merged_strides[kMaxDims];
  int dims = 0;  // from the last to the first
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; d--) {
    if (sizes[d] == 1) continue;
    if (dims && strides[d] == merged_strides[dims - 1] * merged_sizes[dims - 1]) {
      merged_sizes[dims - 1] *= sizes[d];
      continue;
    }
    if (dims == kMaxDims) return false;
    merged_sizes[dims] = sizes[d];
    merged_strides[dims++] = strides[d];
  }
  if (!dims) {
    merged_sizes[dims] = 1;
    merged_strides[dims++] = 0;
  }
  rows.dims = dims;
  for (int d = 0; d < dims; d++) {
    rows.sizes[d] = merged_sizes[dims - 1 - d];
    rows.strides[d] = merged_strides[dims - 1 - d];
  }
  return true;
}

inline std::string rows_refusal(const char* name, const TensorBase& x) {
  if (x.dim() == 0) return text(name, " has no dimension");
  if (x.size(-1) > INT32_MAX) return text(name, " has rows of ", x.size(-1), " elements");
  if (!rows_are_dense(x)) return text(name, " has strides ", x.strides(), ", the last not 1");
  Rows rows;
  if (x.numel() && !rows_of(x, rows)) {
    return text(name, " has more than ", kMaxDims, " dimensions that do not merge");
  }
  return {};
}

// Whether every element has memory of its own, so that it can be written.
inline bool rows_are_apart(const TensorBase& x) {
  Rows rows;
  if (!x.numel() || !rows_of(x, rows)) return true;
  int order[kMaxDims];  // by stride
  for (int d = 0; d < rows.dims; d++) {
    int at = d;
    for (; at && rows.strides[order[at - 1]] > rows.strides[d]; at--) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t extent = x.size(-1);
  for (int k = 0; k < rows.dims; k++) {
    const int d = order[k];
    if (rows.sizes[d] == 1) continue;
    if (rows.strides[d] < extent) return false;
    extent += (rows.sizes[d] - 1) * rows.strides[d];
  }
  return true;
}

inline std::string written_refusal(const char* name, const TensorBase& x) {
  std::string refusal = rows_refusal(name, x);
  if (refusal.empty() && !rows_are_apart(x)) {
    refusal = text(name, " overlaps itself: strides ", x.strides(), ", shape ", x.sizes());
  }
  return refusal;
}

#define VLLM_FL_RETURN_REFUSAL(expression)          \
  if (std::string refusal = (expression); !refusal.empty()) return refusal

inline void raise_if(const char* op, const std::string& refusal) {
  TORCH_CHECK_VALUE(refusal.empty(), op, ": ", refusal);
}

// The address of data that must be there: a fake tensor has none.
inline const void* data_of(const TensorBase& x) {
  const void* data = x.const_data_ptr();
  TORCH_CHECK_VALUE(data != nullptr || x.numel() == 0,
                    "the tensor has no data; torch.ops.vllm_fl has fakes for tracing");
  return data;
}

inline void* written_data_of(const TensorBase& x) {
  data_of(x);
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  return x.mutable_data_ptr();
}

inline bool overlap(const TensorBase& x, const TensorBase& y) {
  if (!x.numel() || !y.numel()) return false;
  auto range = [](const TensorBase& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    const char* begin = static_cast<const char*>(data_of(t));
    return std::make_pair(begin, begin + (last + 1) * t.element_size());
  };
  auto [x_begin, x_end] = range(x);
  auto [y_begin, y_end] = range(y);
  return x_begin < y_end && y_begin < x_end;
}

inline std::string weight_refusal(const TensorBase& x, Maybe weight, Size variance_size) {
  const int64_t hidden = x.size(-1);
  if (variance_size && (*variance_size < 0 || *variance_size > hidden)) {
    return text("variance_size ", *variance_size, " is not within 0 and ", hidden);
  }
  if (weight == nullptr) return {};
  VLLM_FL_RETURN_REFUSAL(float_refusal("weight", *weight, x.device()));
  if (weight->dim() != 1 || weight->size(0) != hidden) {
    return text("weight has shape ", weight->sizes(), ", a row of x has ", hidden, " elements");
  }
  if (!rows_are_dense(*weight)) return "weight is not contiguous";
  return {};
}

std::string gated_refusal(const TensorBase& x) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x, home_of(x)));
  VLLM_FL_RETURN_REFUSAL(rows_refusal("x", x));
  if (x.size(-1) % 2) return text("x has rows of ", x.size(-1), " elements, which is odd");
  return {};
}

std::string rms_norm_refusal(const TensorBase& x, Maybe weight, Size variance_size) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x, home_of(x)));
  VLLM_FL_RETURN_REFUSAL(rows_refusal("x", x));
  return weight_refusal(x, weight, variance_size);
}

std::string fused_add_rms_norm_refusal(const TensorBase& x, const TensorBase& residual,
                                       Maybe weight, Size variance_size) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x, home_of(x)));
  if (residual.scalar_type() != x.scalar_type()) {
    return text("residual is ", residual.dtype(), ", x is ", x.dtype());
  }
  if (residual.sizes() != x.sizes()) {
    return text("residual has shape ", residual.sizes(), ", x has ", x.sizes());
  }
  VLLM_FL_RETURN_REFUSAL(kind_refusal("residual", residual, x.device()));
  VLLM_FL_RETURN_REFUSAL(written_refusal("x", x));
  VLLM_FL_RETURN_REFUSAL(written_refusal("residual", residual));
  return weight_refusal(x, weight, variance_size);
}

inline std::string turned_refusal(const char* name, const TensorBase& x, int64_t tokens,
                                  int64_t head_size, const c10::Device& device) {
  VLLM_FL_RETURN_REFUSAL(kind_refusal(name, x, device));
  VLLM_FL_RETURN_REFUSAL(written_refusal(name, x));
  const int64_t width = x.size(-1);
  if (width % head_size) {
    return text(name, " has rows of ", width, ", which is no multiple of head_size ", head_size);
  }
  if (!x.numel() ? tokens && width : !tokens || (x.numel() / width) % tokens) {
    return text(name, " has shape ", x.sizes(), " for ", tokens, " positions");
  }
  return {};
}

inline std::string angles_refusal(const char* name, const TensorBase& positions,
                                  const TensorBase& cos_sin_cache, int64_t head_size,
                                  const c10::Device& device) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("cos_sin_cache", cos_sin_cache, device));
  VLLM_FL_RETURN_REFUSAL(kind_refusal(name, positions, device));
  if (positions.scalar_type() != at::kLong && positions.scalar_type() != at::kInt) {
    return text(name, " are ", positions.dtype(), ", not int32 or int64");
  }
  if (!positions.is_contiguous()) return text(name, " are not contiguous");
  if (cos_sin_cache.dim() != 2) {
    return text("cos_sin_cache has shape ", cos_sin_cache.sizes(), ", not two dimensions");
  }
  VLLM_FL_RETURN_REFUSAL(rows_refusal("cos_sin_cache", cos_sin_cache));
  const int64_t rotary_dim = cos_sin_cache.size(1);
  if (head_size < 1 || rotary_dim > head_size || rotary_dim % 2) {
    return text("rotary_dim ", rotary_dim, " is odd or above head_size ", head_size);
  }
  return {};
}

std::string rotary_embedding_refusal(const TensorBase& positions, const TensorBase& query,
                                     Maybe key, int64_t head_size,
                                     const TensorBase& cos_sin_cache) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("query", query, home_of(query)));
  VLLM_FL_RETURN_REFUSAL(
      angles_refusal("positions", positions, cos_sin_cache, head_size, query.device()));
  const int64_t tokens = positions.numel();
  VLLM_FL_RETURN_REFUSAL(turned_refusal("query", query, tokens, head_size, query.device()));
  if (key == nullptr) return {};
  if (key->scalar_type() != query.scalar_type()) {
    return text("key is ", key->dtype(), ", query is ", query.dtype());
  }
  return turned_refusal("key", *key, tokens, head_size, query.device());
}

// What every device refuses of fused_qk_norm_rope.
inline std::string norm_rope_refusal(const TensorBase& qkv, const HeadCounts& heads,
                                     int64_t head_dim, const TensorBase& q_weight,
                                     const TensorBase& k_weight,
                                     const TensorBase& cos_sin_cache,
                                     const TensorBase& position_ids) {
  const c10::Device device = home_of(qkv);
  VLLM_FL_RETURN_REFUSAL(float_refusal("qkv", qkv, device));
  VLLM_FL_RETURN_REFUSAL(written_refusal("qkv", qkv));
  if (qkv.dim() != 2) return text("qkv has shape ", qkv.sizes(), ", not two dimensions");
  if (head_dim < 1 || heads.query < 0 || heads.key < 0 || heads.value < 0) {
    return text("there are ", heads.query, ", ", heads.key, " and ", heads.value, " heads of ",
                head_dim);
  }
  const int64_t width = qkv.size(1);
  if (heads.query > width || heads.key > width || heads.value > width ||
      width % head_dim || width / head_dim != heads.query + heads.key + heads.value) {
    return text("qkv has rows of ", width, ", not ", heads.query, ", ", heads.key, " and ",
                heads.value, " heads of ", head_dim);
  }
  for (const auto& [name, weight] :
       {std::pair("q_weight", &q_weight), std::pair("k_weight", &k_weight)}) {
    VLLM_FL_RETURN_REFUSAL(float_refusal(name, *weight, device));
    if (weight->dim() != 1 || weight->size(0) != head_dim) {
      return text(name, " has shape ", weight->sizes(), ", a head has ", head_dim, " elements");
    }
    if (!rows_are_dense(*weight)) return text(name, " is not contiguous");
  }
  VLLM_FL_RETURN_REFUSAL(angles_refusal("position_ids", position_ids, cos_sin_cache, head_dim,
                                      device));
  if (position_ids.numel() != qkv.size(0)) {
    return text("there are ", position_ids.numel(), " position_ids for ", qkv.size(0), " tokens");
  }
  return {};
}

}  // namespace vllm_fl
