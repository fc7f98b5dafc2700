// SPDX-License-Identifier: Apache-2.0
// The operators as plain Python functions and as torch.ops.vllm_fl_C, for the extension of each
// device: what it includes implements ops.h.
//
// A call through torch.ops costs more than a decode step's kernel, so Python calls the
// functions, which take positional arguments and go straight to the kernel. `supports_<op>`
// is a guard: True, or the reason why `<op>` cannot take these arguments.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include "ops.h"

namespace {

using namespace vllm_fl;
using at::Tensor;

// ------------------------------------------------------------------------------------ Python

const Tensor& tensor(PyObject* object, const char* name) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), name, " must be a tensor, found ",
                   Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

Maybe maybe_tensor(PyObject* object, const char* name) {
  return object == Py_None ? nullptr : &tensor(object, name);
}

double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw python_error();
  return value;
}

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

Size maybe_integer(PyObject* object) {
  return object == Py_None ? Size() : Size(integer(object));
}

bool truth(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw python_error();
  return value;
}

void expect(Py_ssize_t found, Py_ssize_t expected) {
  TORCH_CHECK_TYPE(found == expected, "expected ", expected, " positional arguments, found ",
                   found);
}

PyObject* verdict(const std::string& refusal) {
  if (refusal.empty()) Py_RETURN_TRUE;
  return PyUnicode_FromStringAndSize(refusal.data(), static_cast<Py_ssize_t>(refusal.size()));
}

// Steals both references, and drops them if it throws.
PyObject* pair(THPObjectPtr first, THPObjectPtr second) {
  PyObject* both = PyTuple_New(2);
  if (both == nullptr || !first || !second) throw python_error();
  PyTuple_SET_ITEM(both, 0, first.release());
  PyTuple_SET_ITEM(both, 1, second.release());
  return both;
}

PyObject* same_or_wrapped(PyObject* given, const TensorBase& result) {
  if (THPVariable_Unpack(given).is_same(result)) return Py_NewRef(given);
  return THPVariable_Wrap(result);
}

using Arguments = PyObject* const*;

#define VLLM_FL_PROFILED(name) \
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{})

constexpr const char* kGatedNames[] = {"vllm_fl_C::silu_and_mul", "vllm_fl_C::gelu_and_mul",
                                        "vllm_fl_C::gelu_tanh_and_mul",
                                        "vllm_fl_C::mul_and_silu"};

template <Activation activation>
PyObject* gated_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 1);
  VLLM_FL_PROFILED(kGatedNames[static_cast<int>(activation)]);
  return THPVariable_Wrap(gated(activation, tensor(args[0], "x")));
  END_HANDLE_TH_ERRORS
}

PyObject* supports_gated(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 1);
  return verdict(gated_refusal(tensor(args[0], "x")));
  END_HANDLE_TH_ERRORS
}

template <int weight_offset>
PyObject* rms_norm_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 4);
  VLLM_FL_PROFILED("vllm_fl_C::rms_norm");
  return THPVariable_Wrap(rms_norm(tensor(args[0], "x"), maybe_tensor(args[1], "weight"),
                                   number(args[2]), maybe_integer(args[3]), weight_offset));
  END_HANDLE_TH_ERRORS
}

PyObject* supports_rms_norm(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 4);
  return verdict(rms_norm_refusal(tensor(args[0], "x"), maybe_tensor(args[1], "weight"),
                                  maybe_integer(args[3])));
  END_HANDLE_TH_ERRORS
}

template <int weight_offset>
PyObject* fused_add_rms_norm_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 5);
  VLLM_FL_PROFILED("vllm_fl_C::fused_add_rms_norm");
  auto results = fused_add_rms_norm(tensor(args[0], "x"), tensor(args[1], "residual"),
                                    maybe_tensor(args[2], "weight"), number(args[3]),
                                    maybe_integer(args[4]), weight_offset);
  THPObjectPtr first(same_or_wrapped(args[0], results.first));
  THPObjectPtr second(same_or_wrapped(args[1], results.second));
  return pair(std::move(first), std::move(second));
  END_HANDLE_TH_ERRORS
}

PyObject* supports_fused_add_rms_norm(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 5);
  return verdict(fused_add_rms_norm_refusal(tensor(args[0], "x"), tensor(args[1], "residual"),
                                            maybe_tensor(args[2], "weight"),
                                            maybe_integer(args[4])));
  END_HANDLE_TH_ERRORS
}

PyObject* rotary_embedding_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 6);
  VLLM_FL_PROFILED("vllm_fl_C::rotary_embedding");
  rotary_embedding(tensor(args[0], "positions"), tensor(args[1], "query"),
                   maybe_tensor(args[2], "key"), integer(args[3]),
                   tensor(args[4], "cos_sin_cache"), truth(args[5]));
  return pair(THPObjectPtr(Py_NewRef(args[1])), THPObjectPtr(Py_NewRef(args[2])));
  END_HANDLE_TH_ERRORS
}

PyObject* supports_rotary_embedding(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 6);
  return verdict(rotary_embedding_refusal(tensor(args[0], "positions"), tensor(args[1], "query"),
                                          maybe_tensor(args[2], "key"), integer(args[3]),
                                          tensor(args[4], "cos_sin_cache")));
  END_HANDLE_TH_ERRORS
}

HeadCounts head_counts(Arguments args) {
  return {integer(args[1]), integer(args[2]), integer(args[3])};
}

PyObject* norm_rope_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 11);
  VLLM_FL_PROFILED("vllm_fl_C::fused_qk_norm_rope");
  fused_qk_norm_rope(tensor(args[0], "qkv"), head_counts(args), integer(args[4]),
                     number(args[5]), tensor(args[6], "q_weight"), tensor(args[7], "k_weight"),
                     tensor(args[8], "cos_sin_cache"), truth(args[9]),
                     tensor(args[10], "position_ids"));
  return Py_NewRef(args[0]);
  END_HANDLE_TH_ERRORS
}

PyObject* supports_norm_rope(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 11);
  return verdict(fused_qk_norm_rope_refusal(
      tensor(args[0], "qkv"), head_counts(args), integer(args[4]), tensor(args[6], "q_weight"),
      tensor(args[7], "k_weight"), tensor(args[8], "cos_sin_cache"),
      tensor(args[10], "position_ids")));
  END_HANDLE_TH_ERRORS
}

#define VLLM_FL_METHOD(name, function, doc)                                                       \
  { name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc }

// The functions that every device has.
#define VLLM_FL_METHODS                                                                           \
  VLLM_FL_METHOD("silu_and_mul", gated_function<Activation::kSilu>, "silu_and_mul(x)"),           \
  VLLM_FL_METHOD("mul_and_silu", gated_function<Activation::kSiluLast>, "mul_and_silu(x)"),       \
  VLLM_FL_METHOD("gelu_and_mul", gated_function<Activation::kGeluErf>, "gelu_and_mul(x)"),        \
  VLLM_FL_METHOD("gelu_tanh_and_mul", gated_function<Activation::kGeluTanh>,                      \
                 "gelu_tanh_and_mul(x)"),                                                         \
  VLLM_FL_METHOD("supports_gated", supports_gated, "supports_gated(x)"),                          \
  VLLM_FL_METHOD("rms_norm", rms_norm_function<0>,                                                \
                 "rms_norm(x, weight, epsilon, variance_size)"),                                  \
  VLLM_FL_METHOD("gemma_rms_norm", rms_norm_function<1>,                                          \
                 "gemma_rms_norm(x, weight, epsilon, variance_size)"),                            \
  VLLM_FL_METHOD("supports_rms_norm", supports_rms_norm,                                          \
                 "supports_rms_norm(x, weight, epsilon, variance_size)"),                         \
  VLLM_FL_METHOD("fused_add_rms_norm", fused_add_rms_norm_function<0>,                            \
                 "fused_add_rms_norm(x, residual, weight, epsilon, variance_size); in place"),    \
  VLLM_FL_METHOD("fused_add_gemma_rms_norm", fused_add_rms_norm_function<1>,                      \
                 "fused_add_gemma_rms_norm(x, residual, weight, epsilon, variance_size); "        \
                 "in place"),                                                                     \
  VLLM_FL_METHOD("supports_fused_add_rms_norm", supports_fused_add_rms_norm,                      \
                 "supports_fused_add_rms_norm(x, residual, weight, epsilon, variance_size)"),     \
  VLLM_FL_METHOD("rotary_embedding", rotary_embedding_function,                                   \
                 "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox); "   \
                 "in place"),                                                                     \
  VLLM_FL_METHOD("supports_rotary_embedding", supports_rotary_embedding,                          \
                 "supports_rotary_embedding(positions, query, key, head_size, cos_sin_cache, "    \
                   "is_neox)"),                                                                   \
  VLLM_FL_METHOD("fused_qk_norm_rope", norm_rope_function,                                        \
                 "fused_qk_norm_rope(qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, " \
                 "q_weight, k_weight, cos_sin_cache, is_neox, position_ids); in place"),          \
  VLLM_FL_METHOD("supports_fused_qk_norm_rope", supports_norm_rope,                               \
                 "supports_fused_qk_norm_rope(qkv, num_heads_q, num_heads_k, num_heads_v, "       \
                 "head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, position_ids)")

// --------------------------------------------------------------------------------- torch.ops

Maybe borrowed(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

template <Activation activation>
Tensor gated_op(const Tensor& x) {
  return Tensor(gated(activation, x));
}

template <int weight_offset>
Tensor rms_norm_op(const Tensor& x, const std::optional<Tensor>& weight, double epsilon,
                   std::optional<int64_t> variance_size) {
  return Tensor(rms_norm(x, borrowed(weight), epsilon, variance_size, weight_offset));
}

template <int weight_offset>
void fused_add_rms_norm_op(Tensor& x, Tensor& residual, const std::optional<Tensor>& weight,
                           double epsilon, std::optional<int64_t> variance_size) {
  auto results =
      fused_add_rms_norm(x, residual, borrowed(weight), epsilon, variance_size, weight_offset);
  TORCH_CHECK_VALUE(results.first.is_same(x), "fused_add_rms_norm_: x and residual overlap");
}

void rotary_embedding_op(const Tensor& positions, Tensor& query, const std::optional<Tensor>& key,
                         int64_t head_size, const Tensor& cos_sin_cache, bool is_neox) {
  rotary_embedding(positions, query, borrowed(key), head_size, cos_sin_cache, is_neox);
}

void fused_qk_norm_rope_op(Tensor& qkv, int64_t num_heads_q, int64_t num_heads_k,
                           int64_t num_heads_v, int64_t head_dim, double eps,
                           const Tensor& q_weight, const Tensor& k_weight,
                           const Tensor& cos_sin_cache, bool is_neox,
                           const Tensor& position_ids) {
  fused_qk_norm_rope(qkv, {num_heads_q, num_heads_k, num_heads_v}, head_dim, eps, q_weight,
                     k_weight, cos_sin_cache, is_neox, position_ids);
}

#define VLLM_FL_NORM "Tensor? weight, float epsilon, int? variance_size=None"

// Whichever extension is loaded first defines an operator that both have.
void define(torch::Library& library, const std::string& name, const std::string& schema) {
  if (!c10::Dispatcher::singleton().findSchema({"vllm_fl_C::" + name, ""})) {
    library.def((name + schema).c_str());
  }
}

// The operators that every device has.
void define_operators(torch::Library& library) {
  for (const char* name : {"silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"}) {
    define(library, name, "(Tensor x) -> Tensor");
  }
  for (const char* name : {"rms_norm", "gemma_rms_norm"}) {
    define(library, name, "(Tensor x, " VLLM_FL_NORM ") -> Tensor");
  }
  for (const char* name : {"fused_add_rms_norm_", "fused_add_gemma_rms_norm_"}) {
    define(library, name, "(Tensor(a!) x, Tensor(b!) residual, " VLLM_FL_NORM ") -> ()");
  }
  define(library, "rotary_embedding_",
         "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
         "Tensor cos_sin_cache, bool is_neox) -> ()");
  define(library, "fused_qk_norm_rope_",
         "(Tensor(a!) qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, "
         "float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, "
         "Tensor position_ids) -> ()");
}

// The kernels of one device, which is the library's.
void implement_operators(torch::Library& library) {
  library.impl("silu_and_mul", gated_op<Activation::kSilu>);
  library.impl("mul_and_silu", gated_op<Activation::kSiluLast>);
  library.impl("gelu_and_mul", gated_op<Activation::kGeluErf>);
  library.impl("gelu_tanh_and_mul", gated_op<Activation::kGeluTanh>);
  library.impl("rms_norm", rms_norm_op<0>);
  library.impl("gemma_rms_norm", rms_norm_op<1>);
  library.impl("fused_add_rms_norm_", fused_add_rms_norm_op<0>);
  library.impl("fused_add_gemma_rms_norm_", fused_add_rms_norm_op<1>);
  library.impl("rotary_embedding_", rotary_embedding_op);
  library.impl("fused_qk_norm_rope_", fused_qk_norm_rope_op);
}

}  // namespace
