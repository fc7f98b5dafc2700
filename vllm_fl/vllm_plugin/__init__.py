# SPDX-License-Identifier: Apache-2.0
"""What vllm_fl does inside vLLM: the entry point, the layers, the graphs, the route table."""
