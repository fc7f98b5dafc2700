// SPDX-License-Identifier: Apache-2.0
#include "norm.cuh"

namespace vllm_fl {

template gpuError launch_norm_of<float>(const Norm&, const NormRows&, gpuStream);

}  // namespace vllm_fl
