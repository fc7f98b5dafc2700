// SPDX-License-Identifier: Apache-2.0
// vllm_fl._C_cuda: the GPU's kernels, of CUDA or HIP.
#include "../bindings.h"
#include "operators.h"
#if defined(VLLM_FL_TUNE)
#include "tuning.h"
#endif

namespace {

std::string_view words(PyObject* object) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) throw python_error();
  return {data, static_cast<size_t>(size)};
}

PyObject* cache_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 8);
  VLLM_FL_PROFILED("vllm_fl_C::reshape_and_cache_flash");
  reshape_and_cache_flash(tensor(args[0], "key"), tensor(args[1], "value"),
                          tensor(args[2], "key_cache"), tensor(args[3], "value_cache"),
                          tensor(args[4], "slot_mapping"), words(args[5]));
  return pair(THPObjectPtr(Py_NewRef(args[2])), THPObjectPtr(Py_NewRef(args[3])));
  END_HANDLE_TH_ERRORS
}

PyObject* supports_cache(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 8);
  return verdict(reshape_and_cache_flash_refusal(
      tensor(args[0], "key"), tensor(args[1], "value"), tensor(args[2], "key_cache"),
      tensor(args[3], "value_cache"), tensor(args[4], "slot_mapping"), words(args[5])));
  END_HANDLE_TH_ERRORS
}

#if defined(VLLM_FL_TUNE)
PyObject* tune_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  const std::string_view asked = words(args[0]);
  for (int choice = 0; choice < kChoices; choice++) {
    if (asked == choice_names[choice]) {
      choices[choice] = static_cast<int>(integer(args[1]));
      Py_RETURN_NONE;
    }
  }
  TORCH_CHECK_VALUE(false, "there is no choice ", asked);
  END_HANDLE_TH_ERRORS
}

PyObject* choices_function(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const char* name : choice_names) {
    PyObject* text = PyUnicode_FromString(name);
    if (names == nullptr || text == nullptr || PyList_Append(names, text) < 0) return nullptr;
    Py_DECREF(text);
  }
  return names;
}
#endif

PyMethodDef methods[] = {
    VLLM_FL_METHODS,
    VLLM_FL_METHOD("reshape_and_cache_flash", cache_function,
                   "reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "
                   "kv_cache_dtype, k_scale, v_scale); in place"),
    VLLM_FL_METHOD("supports_reshape_and_cache_flash", supports_cache,
                   "supports_reshape_and_cache_flash(key, value, key_cache, value_cache, "
                   "slot_mapping, kv_cache_dtype, k_scale, v_scale)"),
#if defined(VLLM_FL_TUNE)
    VLLM_FL_METHOD("tune", tune_function, "tune(choice, value); -1: as it is without it"),
    {"choices", choices_function, METH_NOARGS, "The names of the choices."},
#endif
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "vllm_fl._C_cuda", "Native kernels; import torch first.", -1, methods,
    nullptr,               nullptr,           nullptr,                               nullptr};

void reshape_and_cache_flash_op(const Tensor& key, const Tensor& value, Tensor& key_cache,
                                Tensor& value_cache, const Tensor& slot_mapping,
                                c10::string_view kv_cache_dtype, const Tensor&, const Tensor&) {
  reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping,
                          {kv_cache_dtype.data(), kv_cache_dtype.size()});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vllm_fl_C, library) {
  define_operators(library);
  define(library, "reshape_and_cache_flash_",
         "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
         "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()");
}

TORCH_LIBRARY_IMPL(vllm_fl_C, CUDA, library) {
  implement_operators(library);
  library.impl("reshape_and_cache_flash_", reshape_and_cache_flash_op);
}

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&module_definition); }
