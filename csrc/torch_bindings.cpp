// SPDX-License-Identifier: Apache-2.0
// vllm_fl._C: the CPU's kernels.
#include "bindings.h"
#include "cpu/bound.h"
#include "cpu/ops.h"

namespace {

PyObject* capability_function(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return PyUnicode_FromString(cpu_capability());
  END_HANDLE_TH_ERRORS
}

PyObject* set_direct_function(PyObject*, Arguments args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect(count, 2);
  const char* binding = PyUnicode_AsUTF8(args[0]);
  if (binding == nullptr) throw python_error();
  set_direct(binding, truth(args[1]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    VLLM_FL_METHODS,
    VLLM_FL_METHOD("set_direct", set_direct_function,
                   "set_direct(binding, on): whether graphs' calls for it go to the kernel"),
    {"cpu_capability", capability_function, METH_NOARGS,
     "The instruction set in use: DEFAULT, AVX2 or AVX512."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "vllm_fl._C", "Native kernels; import torch first.", -1, methods,
    nullptr,               nullptr,      nullptr,                               nullptr};

}  // namespace

TORCH_LIBRARY_FRAGMENT(vllm_fl_C, library) {
  define_operators(library);
  define_bound(library);
}
TORCH_LIBRARY_IMPL(vllm_fl_C, CPU, library) {
  implement_operators(library);
  implement_bound(library);
}

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_definition); }
