# SPDX-License-Identifier: Apache-2.0
"""Claims in vLLM what vllm-ascend claims, on a CPU: its platform, without a test for the
hardware, and its layers by name, when its worker is initialised. Put this folder's parent on
PYTHONPATH. None of it is vllm-ascend's code."""


def register() -> str:
    """The entry point `vllm.platform_plugins: ascend`."""
    return "vllm_ascend.platform.NPUPlatform"


def register_model() -> None:
    """The entry point `vllm.general_plugins: ascend_model`, which every process runs."""
