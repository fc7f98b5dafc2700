# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CUDA kernels, called without its Python wrappers."""
