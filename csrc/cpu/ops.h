// SPDX-License-Identifier: Apache-2.0
// The operators on tensors of the CPU.
#pragma once

#include "../ops.h"

namespace vllm_fl {

// "DEFAULT", "AVX2" or "AVX512": what this process runs, as torch chose it. The environment
// variable ATEN_CPU_CAPABILITY chooses less than the CPU has.
const char* cpu_capability();

}  // namespace vllm_fl
