# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CUDA kernels, one file per family."""
