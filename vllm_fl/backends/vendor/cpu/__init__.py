# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CPU kernels, served behind guards."""
