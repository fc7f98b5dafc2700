// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "tuning.h"

namespace vllm_fl {

#if defined(VLLM_FL_TUNE)
int choices[kChoices] = {-1, -1, -1, -1, -1, -1, -1, -1};
#endif

const char* error_text(gpuError error);

const char* error_text(gpuError error) {
#if VLLM_FL_HIP
  return hipGetErrorString(error);
#else
  return cudaGetErrorString(error);
#endif
}

template <class T>
gpuError launch_norm_of(const Norm& arguments, const NormRows& rows, gpuStream stream);

gpuError launch_norm(const Norm& a, const NormRows& rows, gpuStream stream) {
  return a.type == kFloat32    ? launch_norm_of<float>(a, rows, stream)
         : a.type == kBFloat16 ? launch_norm_of<BFloat16>(a, rows, stream)
                               : launch_norm_of<Float16>(a, rows, stream);
}

}  // namespace vllm_fl
