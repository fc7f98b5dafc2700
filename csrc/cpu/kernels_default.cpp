// SPDX-License-Identifier: Apache-2.0
#include "kernels_impl.h"

namespace vllm_fl {
extern const Kernels kernels_default = VLLM_FL_KERNELS("DEFAULT");
}  // namespace vllm_fl
