# SPDX-License-Identifier: Apache-2.0
"""The platform: vLLM's CPU platform under vllm-ascend's name, with a worker of its own."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class NPUPlatform(CpuPlatform):
    """Chooses the worker that claims the layers."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "vllm_ascend.worker.NPUWorker"
