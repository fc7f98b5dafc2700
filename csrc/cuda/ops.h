// SPDX-License-Identifier: Apache-2.0
// The operators on tensors of a GPU: those of ../ops.h, and the ones that only GPUs have.
#pragma once

#include <string_view>

#include "../ops.h"

namespace vllm_fl {

// In place: the rows of key and value, (rows, heads, head_size), go to the slots of the first
// slot_mapping.size(0) of them. The caches, (blocks, block_size, heads, head_size), may have any
// strides but for the last, and hold what key and value hold.
std::string reshape_and_cache_flash_refusal(const TensorBase& key, const TensorBase& value,
                                            const TensorBase& key_cache,
                                            const TensorBase& value_cache,
                                            const TensorBase& slot_mapping,
                                            std::string_view kv_cache_dtype);
void reshape_and_cache_flash(const TensorBase& key, const TensorBase& value,
                             const TensorBase& key_cache, const TensorBase& value_cache,
                             const TensorBase& slot_mapping, std::string_view kv_cache_dtype);

}  // namespace vllm_fl
