# SPDX-License-Identifier: Apache-2.0
"""vllm_fl: operator dispatch across AI chips for vLLM."""

__version__ = "0.1.0"
