// SPDX-License-Identifier: Apache-2.0
// Operators for compiled graphs, which name what a layer is bound to: torch.ops.vllm_fl_C.<op>.bound.
//
// Where a binding is direct, and the kernel takes the arguments, the kernel runs and no Python does.
// Every other call goes on to torch.ops.vllm_fl.<op>, which knows all bindings, all implementations
// and whether calls are counted.
#pragma once

#include <torch/library.h>

#include <string>

namespace vllm_fl {

// Whether calls for a binding go to the kernel at once.
void set_direct(const std::string& binding, bool on);

void define_bound(torch::Library& library);
void implement_bound(torch::Library& library);

}  // namespace vllm_fl
