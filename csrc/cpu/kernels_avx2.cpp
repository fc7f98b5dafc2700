// SPDX-License-Identifier: Apache-2.0
#include "kernels_impl.h"

namespace vllm_fl {
extern const Kernels kernels_avx2 = VLLM_FL_KERNELS("AVX2");
}  // namespace vllm_fl
