// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "kernels.h"

namespace vllm_fl {
namespace {

// What one thread does at least, in elements: a parallel region costs 2 to 10 us, in which a
// thread norms or gates as many. Decode steps stay below it, and so never need a thread: after
// a fork there is none.
constexpr int64_t kGrain = 32768;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

int type_index(c10::ScalarType type) {
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

// ---------------------------------------------------------------------------------- refusals

// Why a tensor is not of a kind that the kernels read, or nothing. Metadata only.
std::string kind_refusal(const char* name, const TensorBase& x) {
  if (!x.is_cpu()) return text(name, " is on ", x.device());
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

std::string float_refusal(const char* name, const TensorBase& x) {
  if (type_index(x.scalar_type()) < 0) {
    return text("dtype ", x.dtype(), " of ", name, " is not float32, bfloat16 or float16");
  }
  return kind_refusal(name, x);
}

bool rows_are_dense(const TensorBase& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1;
}

// The dimensions but for the last, as few as possible. False: there are too many.
bool rows_of(const TensorBase& x, Rows& rows) {
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

std::string rows_refusal(const char* name, const TensorBase& x) {
  if (x.dim() == 0) return text(name, " has no dimension");
  if (!rows_are_dense(x)) return text(name, " has strides ", x.strides(), ", the last not 1");
  Rows rows;
  if (x.numel() && !rows_of(x, rows)) {
    return text(name, " has more than ", kMaxDims, " dimensions that do not merge");
  }
  return {};
}

// Whether every element has memory of its own, so that it can be written.
bool rows_are_apart(const TensorBase& x) {
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

std::string written_refusal(const char* name, const TensorBase& x) {
  std::string refusal = rows_refusal(name, x);
  if (refusal.empty() && !rows_are_apart(x)) {
    refusal = text(name, " overlaps itself: strides ", x.strides(), ", shape ", x.sizes());
  }
  return refusal;
}

#define VLLM_FL_RETURN_REFUSAL(expression)          \
  if (std::string refusal = (expression); !refusal.empty()) return refusal

void raise_if(const char* op, const std::string& refusal) {
  TORCH_CHECK_VALUE(refusal.empty(), op, ": ", refusal);
}

// The address of data that must be there: a fake tensor has none.
const void* data_of(const TensorBase& x) {
  const void* data = x.const_data_ptr();
  TORCH_CHECK_VALUE(data != nullptr || x.numel() == 0,
                    "the tensor has no data; torch.ops.vllm_fl has fakes for tracing");
  return data;
}

void* written_data_of(const TensorBase& x) {
  data_of(x);
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  return x.mutable_data_ptr();
}

bool overlap(const TensorBase& x, const TensorBase& y) {
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

// The rows of a matrix whose last stride is 1, in memory of their own.
TensorBase copy_of(const TensorBase& matrix) {
  TensorBase copy = at::detail::empty_cpu(matrix.sizes(), matrix.scalar_type());
  const size_t row = matrix.size(1) * matrix.element_size();
  const char* from = static_cast<const char*>(data_of(matrix));
  char* to = static_cast<char*>(copy.mutable_data_ptr());
  for (int64_t r = 0; r < matrix.size(0); r++, to += row) {
    std::memcpy(to, from + r * matrix.stride(0) * matrix.element_size(), row);
  }
  return copy;
}

std::string weight_refusal(const TensorBase& x, Maybe weight, Size variance_size) {
  const int64_t hidden = x.size(-1);
  if (variance_size && (*variance_size < 0 || *variance_size > hidden)) {
    return text("variance_size ", *variance_size, " is not within 0 and ", hidden);
  }
  if (weight == nullptr) return {};
  VLLM_FL_RETURN_REFUSAL(float_refusal("weight", *weight));
  if (weight->dim() != 1 || weight->size(0) != hidden) {
    return text("weight has shape ", weight->sizes(), ", a row of x has ", hidden, " elements");
  }
  if (!rows_are_dense(*weight)) return "weight is not contiguous";
  return {};
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

const char* cpu_capability() { return kernels().name; }

// --------------------------------------------------------------------------------- operators

std::string gated_refusal(const TensorBase& x) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x));
  VLLM_FL_RETURN_REFUSAL(rows_refusal("x", x));
  if (x.size(-1) % 2) return text("x has rows of ", x.size(-1), " elements, which is odd");
  return {};
}

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

std::string rms_norm_refusal(const TensorBase& x, Maybe weight, Size variance_size) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x));
  VLLM_FL_RETURN_REFUSAL(rows_refusal("x", x));
  return weight_refusal(x, weight, variance_size);
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

std::string fused_add_rms_norm_refusal(const TensorBase& x, const TensorBase& residual,
                                       Maybe weight, Size variance_size) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("x", x));
  if (residual.scalar_type() != x.scalar_type()) {
    return text("residual is ", residual.dtype(), ", x is ", x.dtype());
  }
  if (residual.sizes() != x.sizes()) {
    return text("residual has shape ", residual.sizes(), ", x has ", x.sizes());
  }
  VLLM_FL_RETURN_REFUSAL(kind_refusal("residual", residual));
  VLLM_FL_RETURN_REFUSAL(written_refusal("x", x));
  VLLM_FL_RETURN_REFUSAL(written_refusal("residual", residual));
  return weight_refusal(x, weight, variance_size);
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

std::string turned_refusal(const char* name, const TensorBase& x, int64_t tokens,
                           int64_t head_size) {
  VLLM_FL_RETURN_REFUSAL(kind_refusal(name, x));
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

std::string rotary_embedding_refusal(const TensorBase& positions, const TensorBase& query,
                                     Maybe key, int64_t head_size,
                                     const TensorBase& cos_sin_cache) {
  VLLM_FL_RETURN_REFUSAL(float_refusal("query", query));
  VLLM_FL_RETURN_REFUSAL(float_refusal("cos_sin_cache", cos_sin_cache));
  VLLM_FL_RETURN_REFUSAL(kind_refusal("positions", positions));
  if (positions.scalar_type() != at::kLong && positions.scalar_type() != at::kInt) {
    return text("positions are ", positions.dtype(), ", not int32 or int64");
  }
  if (!positions.is_contiguous()) return "positions are not contiguous";
  if (cos_sin_cache.dim() != 2) {
    return text("cos_sin_cache has shape ", cos_sin_cache.sizes(), ", not two dimensions");
  }
  VLLM_FL_RETURN_REFUSAL(rows_refusal("cos_sin_cache", cos_sin_cache));
  const int64_t rotary_dim = cos_sin_cache.size(1);
  if (head_size < 1 || rotary_dim > head_size || rotary_dim % 2) {
    return text("rotary_dim ", rotary_dim, " is odd or above head_size ", head_size);
  }
  const int64_t tokens = positions.numel();
  VLLM_FL_RETURN_REFUSAL(turned_refusal("query", query, tokens, head_size));
  if (key == nullptr) return {};
  if (key->scalar_type() != query.scalar_type()) {
    return text("key is ", key->dtype(), ", query is ", query.dtype());
  }
  return turned_refusal("key", *key, tokens, head_size);
}

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
  const int64_t known = cos_sin_cache.size(0);
  const void* given = data_of(positions);
  const bool are_64_bit = positions.scalar_type() == at::kLong;
  c10::SmallVector<int64_t, 64> checked(tokens);
  for (int64_t token = 0; token < tokens; token++) {  // before anything is written
    const int64_t position = are_64_bit ? static_cast<const int64_t*>(given)[token]
                                        : static_cast<const int32_t*>(given)[token];
    checked[token] = position;
    TORCH_CHECK_INDEX(position >= 0 && position < known, "rotary_embedding: position ", position,
                      " of token ", token, " is not within the cache's ", known);
  }
  rotary.positions = checked.data();
  rotary.turned[0] = turned_of(query, tokens, head_size);
  const bool same = key != nullptr && key->is_same(query);
  if (key != nullptr && !same) rotary.turned[1] = turned_of(*key, tokens, head_size);
  int64_t per_token = query.numel() / tokens + (key == nullptr ? 0 : key->numel() / tokens);
  run(kernels().rotary[type_index(query.scalar_type())][type_index(cos_sin_cache.scalar_type())],
      rotary, tokens, per_token);
}

}  // namespace vllm_fl
