// SPDX-License-Identifier: Apache-2.0
// The operators of ops.h: what is refused, where the results go, which rows a kernel is given.
// Included once, by bindings.cpp.
//
// Only torch's libraries for any device are linked, so the extension can be loaded, and its
// guards asked, where torch has no CUDA.
#pragma once

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include "../refusals.h"
#include "kernels.h"
#include "ops.h"

namespace vllm_fl {

const char* error_text(gpuError error);

#if defined(VLLM_FL_EMULATED)  // the tests run the kernels on the CPU

c10::Device home_of(const TensorBase&) { return c10::Device(c10::DeviceType::CPU); }

namespace {
gpuStream current_stream(const TensorBase&) { return nullptr; }
}  // namespace

#else

c10::Device home_of(const TensorBase& x) {
  return x.is_cuda() ? x.device() : c10::Device(c10::DeviceType::CUDA);
}

namespace {

// torch's current stream of a device, by torch's C interface: its C++ has moved from release to
// release, and lives in a library that only some builds of torch have.
gpuStream current_stream(const TensorBase& x) {
  using Find = int32_t (*)(int32_t device_index, void** stream);
  static const Find find = [] {
    constexpr const char* name = "aoti_torch_get_current_cuda_stream";
    void* found = dlsym(RTLD_DEFAULT, name);
    for (const char* library : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      if (found != nullptr) break;
      void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
      if (loaded != nullptr) found = dlsym(loaded, name);
    }
    TORCH_CHECK(found != nullptr, "vllm_fl's kernels: this torch has no function ", name);
    return reinterpret_cast<Find>(found);
  }();
  void* stream = nullptr;
  TORCH_CHECK(find(x.get_device(), &stream) == 0, "vllm_fl's kernels: torch has no stream for ",
              x.device());
  return static_cast<gpuStream>(stream);
}

}  // namespace

#endif

namespace {

using at::Tensor;

void raise_if_failed(const char* op, gpuError error) {
  TORCH_CHECK(error == kSuccess, op, ": the kernel was not launched: ", error_text(error));
}

TensorBase empty_like(const TensorBase& x, at::IntArrayRef shape) {
  return at::empty(shape, x.options());
}

// A tensor that is read, in memory of its own where it shares it with one that is written.
Tensor apart_from(const TensorBase& read, const TensorBase& written) {
  const Tensor same(read);
  return overlap(read, written) ? at::clone(same, at::MemoryFormat::Contiguous) : same;
}

// The rows of tensors of one shape, as two dimensions that are the same in all of them. False: they
// are not so simple.
template <size_t count>
bool simple_rows(const TensorBase* const (&tensors)[count], Divider& inner,
                 Strides* const (&strides)[count]) {
  const auto sizes = tensors[0]->sizes();
  int64_t merged[2] = {1, 1};  // the inner dimension first
  int64_t steps[count][2] = {};
  int dims = 0;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; d--) {
    if (sizes[d] == 1) continue;
    bool merges = dims > 0;
    for (size_t t = 0; merges && t < count; t++) {
      merges = tensors[t]->stride(d) == steps[t][dims - 1] * merged[dims - 1];
    }
    if (merges) {
      merged[dims - 1] *= sizes[d];
      continue;
    }
    if (dims == 2) return false;
    merged[dims] = sizes[d];
    for (size_t t = 0; t < count; t++) steps[t][dims] = tensors[t]->stride(d);
    dims++;
  }
  if (merged[0] > kMaxRows || merged[1] > kMaxRows) return false;
  inner = Divider(dims < 2 ? 1 : static_cast<uint32_t>(merged[0]));
  for (size_t t = 0; t < count; t++) {
    *strides[t] = dims < 2 ? Strides{steps[t][0], 0} : Strides{steps[t][1], steps[t][0]};
  }
  return true;
}

Norm norm_of(const TensorBase& x, Maybe weight, double epsilon, Size variance_size,
             double weight_offset) {
  Norm norm{};
  norm.x = data_of(x);
  norm.weight = weight == nullptr ? nullptr : data_of(*weight);
  norm.hidden = static_cast<int>(x.size(-1));
  norm.rows = x.numel() / norm.hidden;
  norm.averaged = static_cast<int>(variance_size.value_or(norm.hidden));
  norm.of_average = 1.0f / static_cast<float>(norm.averaged);
  norm.epsilon = static_cast<float>(epsilon);
  norm.weight_offset = static_cast<float>(weight_offset);
  norm.type = type_index(x.scalar_type());
  norm.weight_type = weight == nullptr ? norm.type : type_index(weight->scalar_type());
  return norm;
}

}  // namespace

// ------------------------------------------------------------------------------- activations

TensorBase gated(Activation activation, const TensorBase& x) {
  raise_if("a gated activation", gated_refusal(x));
  const c10::DeviceGuard guard(x.device());
  c10::SmallVector<int64_t, 5> shape(x.sizes().begin(), x.sizes().end());
  const int64_t width = shape.back() /= 2;
  TensorBase out = empty_like(x, shape);
  if (!out.numel()) return out;
  Gated a{};
  const char* first = static_cast<const char*>(data_of(x));
  const char* second = first + width * x.element_size();
  const bool gate_last = activation == Activation::kSiluLast;
  a.gate = gate_last ? second : first;
  a.up = gate_last ? first : second;
  a.out = out.mutable_data_ptr();
  a.rows = out.numel() / width;
  a.width = width;
  a.type = type_index(x.scalar_type());
  a.is_simple = a.rows <= kMaxRows && simple_rows<1>({&x}, a.inner, {&a.strides});
  Rows rows;
  rows_of(x, rows);
  const Gate gate = activation == Activation::kGeluErf    ? Gate::kGeluErf
                    : activation == Activation::kGeluTanh ? Gate::kGeluTanh
                                                          : Gate::kSilu;
  raise_if_failed("a gated activation", launch_gated(gate, a, rows, current_stream(x)));
  return out;
}

// -------------------------------------------------------------------------------------- norms

TensorBase rms_norm(const TensorBase& x, Maybe weight, double epsilon, Size variance_size,
                    double weight_offset) {
  raise_if("rms_norm", rms_norm_refusal(x, weight, variance_size));
  const c10::DeviceGuard guard(x.device());
  TensorBase out = empty_like(x, x.sizes());
  if (!out.numel()) return out;
  Norm norm = norm_of(x, weight, epsilon, variance_size, weight_offset);
  norm.out = out.mutable_data_ptr();
  norm.is_simple =
      simple_rows<2>({&x, &out}, norm.inner, {&norm.x_strides, &norm.out_strides});
  NormRows rows;
  rows_of(x, rows.x);
  rows_of(out, rows.out);
  raise_if_failed("rms_norm", launch_norm(norm, rows, current_stream(x)));
  return out;
}

std::pair<TensorBase, TensorBase> fused_add_rms_norm(const TensorBase& x,
                                                     const TensorBase& residual, Maybe weight,
                                                     double epsilon, Size variance_size,
                                                     double weight_offset) {
  raise_if("fused_add_rms_norm",
           fused_add_rms_norm_refusal(x, residual, weight, variance_size));
  if (!x.numel()) return {x, residual};
  const c10::DeviceGuard guard(x.device());
  Norm norm = norm_of(x, weight, epsilon, variance_size, weight_offset);
  norm.residual = data_of(residual);
  std::pair<TensorBase, TensorBase> results{x, residual};
  if (overlap(x, residual) ||
      (weight != nullptr && (overlap(*weight, x) || overlap(*weight, residual)))) {
    results = {empty_like(x, x.sizes()), empty_like(x, x.sizes())};
    norm.out = results.first.mutable_data_ptr();
    norm.total = results.second.mutable_data_ptr();
  } else {
    norm.out = written_data_of(x);
    norm.total = written_data_of(residual);
  }
  norm.is_simple = simple_rows<4>(
      {&x, &residual, &results.first, &results.second}, norm.inner,
      {&norm.x_strides, &norm.residual_strides, &norm.out_strides, &norm.total_strides});
  NormRows rows;
  rows_of(x, rows.x);
  rows_of(residual, rows.residual);
  rows_of(results.first, rows.out);
  rows_of(results.second, rows.total);
  raise_if_failed("fused_add_rms_norm", launch_norm(norm, rows, current_stream(x)));
  return results;
}

// ------------------------------------------------------------------------------------- rotary

namespace {

// False: its heads do not lie at even distances.
bool heads_of(const TensorBase& x, int64_t tokens, int64_t head_size, Heads& heads,
              HeadRows& in_rows) {
  heads.data = written_data_of(x);
  const Rows& rows = in_rows.rows;
  rows_of(x, in_rows.rows);
  const int64_t per_token = in_rows.rows_per_token = x.numel() / x.size(-1) / tokens;
  const int64_t per_row = in_rows.heads_per_row = x.size(-1) / head_size;
  heads.heads = per_token * per_row;
  const int64_t step = rows.strides[rows.dims - 1];
  if (rows.dims == 2 && rows.sizes[1] == per_token) {
    heads.token_stride = rows.strides[0];
  } else if (rows.dims == 1) {
    heads.token_stride = per_token * step;
  } else {
    return false;
  }
  heads.head_stride = per_row == 1 ? step : head_size;
  return per_token == 1 || per_row == 1 || step == per_row * head_size;
}

Angles angles_of(const TensorBase& positions, const TensorBase& cos_sin_cache) {
  Angles angles{};
  angles.positions = data_of(positions);
  angles.positions_are_64_bit = positions.scalar_type() == at::kLong;
  angles.cache = data_of(cos_sin_cache);
  angles.cache_rows = cos_sin_cache.size(0);
  angles.cache_stride = cos_sin_cache.stride(0);
  angles.cache_type = type_index(cos_sin_cache.scalar_type());
  return angles;
}

}  // namespace

void rotary_embedding(const TensorBase& positions, const TensorBase& query, Maybe key,
                      int64_t head_size, const TensorBase& cos_sin_cache, bool is_neox) {
  raise_if("rotary_embedding",
           rotary_embedding_refusal(positions, query, key, head_size, cos_sin_cache));
  const int64_t tokens = positions.numel(), rotary_dim = cos_sin_cache.size(1);
  if (!tokens || !rotary_dim) return;
  const c10::DeviceGuard guard(query.device());
  Tensor places = apart_from(positions, query), cache = apart_from(cos_sin_cache, query);
  const bool has_key = key != nullptr && !key->is_same(query) && key->numel() != 0;
  if (has_key) {
    places = apart_from(places, *key);
    cache = apart_from(cache, *key);
  }
  Rotary a{};
  a.angles = angles_of(places, cache);
  a.tokens = tokens;
  a.half = static_cast<int>(rotary_dim / 2);
  a.head_size = static_cast<int>(head_size);
  a.type = type_index(query.scalar_type());
  a.is_neox = is_neox;
  a.is_simple = true;
  RotaryRows rows{};
  if (query.numel()) a.is_simple = heads_of(query, tokens, head_size, a.turned[0], rows.turned[0]);
  if (has_key) a.is_simple &= heads_of(*key, tokens, head_size, a.turned[1], rows.turned[1]);
  if (a.turned[0].heads + a.turned[1].heads == 0) return;
  raise_if_failed("rotary_embedding", launch_rotary(a, rows, current_stream(query)));
}

// ---------------------------------------------------------------- norm of heads, then rotary

std::string fused_qk_norm_rope_refusal(const TensorBase& qkv, const HeadCounts& heads,
                                       int64_t head_dim, const TensorBase& q_weight,
                                       const TensorBase& k_weight,
                                       const TensorBase& cos_sin_cache,
                                       const TensorBase& position_ids) {
  return norm_rope_refusal(qkv, heads, head_dim, q_weight, k_weight, cos_sin_cache, position_ids);
}

void fused_qk_norm_rope(const TensorBase& qkv, const HeadCounts& heads, int64_t head_dim,
                        double eps, const TensorBase& q_weight, const TensorBase& k_weight,
                        const TensorBase& cos_sin_cache, bool is_neox,
                        const TensorBase& position_ids) {
  raise_if("fused_qk_norm_rope", fused_qk_norm_rope_refusal(qkv, heads, head_dim, q_weight,
                                                            k_weight, cos_sin_cache,
                                                            position_ids));
  if (!qkv.size(0) || heads.query + heads.key == 0) return;
  const c10::DeviceGuard guard(qkv.device());
  const Tensor places = apart_from(position_ids, qkv), cache = apart_from(cos_sin_cache, qkv);
  const Tensor of_query = apart_from(q_weight, qkv), of_key = apart_from(k_weight, qkv);
  NormRotary a{};
  a.angles = angles_of(places, cache);
  a.qkv = written_data_of(qkv);
  a.tokens = qkv.size(0);
  a.token_stride = qkv.stride(0);
  a.query_heads = static_cast<int>(heads.query);
  a.key_heads = static_cast<int>(heads.key);
  a.head_size = static_cast<int>(head_dim);
  a.half = static_cast<int>(cos_sin_cache.size(1) / 2);
  a.of_average = 1.0f / static_cast<float>(head_dim);
  a.epsilon = static_cast<float>(eps);
  a.query_weight = data_of(of_query);
  a.key_weight = data_of(of_key);
  a.query_weight_type = type_index(q_weight.scalar_type());
  a.key_weight_type = type_index(k_weight.scalar_type());
  a.type = type_index(qkv.scalar_type());
  a.is_neox = is_neox;
  raise_if_failed("fused_qk_norm_rope", launch_norm_rotary(a, current_stream(qkv)));
}

// -------------------------------------------------------------------------------------- cache

std::string reshape_and_cache_flash_refusal(const TensorBase& key, const TensorBase& value,
                                            const TensorBase& key_cache,
                                            const TensorBase& value_cache,
                                            const TensorBase& slot_mapping,
                                            std::string_view kv_cache_dtype) {
  const c10::Device device = home_of(key);
  VLLM_FL_RETURN_REFUSAL(float_refusal("key", key, device));
  if (key.dim() != 3) return text("key has shape ", key.sizes(), ", not three dimensions");
  for (const auto& [name, x] : {std::pair("value", &value), std::pair("key_cache", &key_cache),
                                std::pair("value_cache", &value_cache),
                                std::pair("slot_mapping", &slot_mapping)}) {
    VLLM_FL_RETURN_REFUSAL(kind_refusal(name, *x, device));
  }
  bool copies = false;  // vLLM's names for a cache that holds the rows as they are
  for (const char* name : {"auto", "float16", "half", "bfloat16", "float32", "float"}) {
    copies |= kv_cache_dtype == name;
  }
  if (!copies) return text("kv_cache_dtype '", kv_cache_dtype, "' is not stored as it is");
  for (const auto& [name, x] : {std::pair("value", &value), std::pair("key_cache", &key_cache),
                                std::pair("value_cache", &value_cache)}) {
    if (x->scalar_type() != key.scalar_type()) {
      return text(name, " is ", x->dtype(), ", key is ", key.dtype());
    }
  }
  if (value.sizes() != key.sizes()) {
    return text("value has shape ", value.sizes(), ", key has ", key.sizes());
  }
  if (key_cache.dim() != 4 || key_cache.sizes().slice(2) != key.sizes().slice(1)) {
    return text("key_cache has shape ", key_cache.sizes(), ", key has ", key.sizes());
  }
  if (value_cache.sizes() != key_cache.sizes()) {
    return text("value_cache has shape ", value_cache.sizes(), ", key_cache has ",
                key_cache.sizes());
  }
  VLLM_FL_RETURN_REFUSAL(rows_refusal("key", key));
  VLLM_FL_RETURN_REFUSAL(rows_refusal("value", value));
  VLLM_FL_RETURN_REFUSAL(written_refusal("key_cache", key_cache));
  VLLM_FL_RETURN_REFUSAL(written_refusal("value_cache", value_cache));
  constexpr int64_t most = int64_t{1} << 22;  // one dimension of a grid holds as many
  if (key.size(1) > most || key.size(2) > most || key.size(1) * key.size(2) > most) {
    return text("a token has ", key.size(1), " heads of ", key.size(2), ", more than ", most,
                " elements");
  }
  if (slot_mapping.scalar_type() != at::kLong && slot_mapping.scalar_type() != at::kInt) {
    return text("slot_mapping is ", slot_mapping.dtype(), ", not int32 or int64");
  }
  if (slot_mapping.dim() != 1 || !slot_mapping.is_contiguous()) {
    return text("slot_mapping has shape ", slot_mapping.sizes(), " and strides ",
                slot_mapping.strides());
  }
  if (slot_mapping.numel() > key.size(0)) {
    return text("there are ", slot_mapping.numel(), " slots for ", key.size(0), " keys");
  }
  return {};
}

void reshape_and_cache_flash(const TensorBase& key, const TensorBase& value,
                             const TensorBase& key_cache, const TensorBase& value_cache,
                             const TensorBase& slot_mapping, std::string_view kv_cache_dtype) {
  raise_if("reshape_and_cache_flash",
           reshape_and_cache_flash_refusal(key, value, key_cache, value_cache, slot_mapping,
                                           kv_cache_dtype));
  CacheWrite a{};
  a.tokens = slot_mapping.numel();
  if (!a.tokens || !key.numel() || !key_cache.numel()) return;
  const c10::DeviceGuard guard(key.device());
  const Tensor slots = apart_from(apart_from(slot_mapping, key_cache), value_cache);
  a.slots = data_of(slots);
  a.slots_are_64_bit = slots.scalar_type() == at::kLong;
  a.heads = key.size(1);
  a.head_size = key.size(2);
  a.blocks = key_cache.size(0);
  a.block_size = key_cache.size(1);
  a.element_size = static_cast<int>(key.element_size());
  const Tensor rows[2] = {apart_from(apart_from(key, key_cache), value_cache),
                          apart_from(apart_from(value, key_cache), value_cache)};
  const TensorBase* caches[2] = {&key_cache, &value_cache};
  for (int k = 0; k < 2; k++) {
    a.sides[k] = {data_of(rows[k]),     written_data_of(*caches[k]), rows[k].stride(0),
                  rows[k].stride(1),    caches[k]->stride(0),        caches[k]->stride(1),
                  caches[k]->stride(2)};
  }
  raise_if_failed("reshape_and_cache_flash", launch_cache_write(a, current_stream(key)));
}

}  // namespace vllm_fl
