# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU worker, with what it takes for granted of CUDA's memory allocator left out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from .explained import explained

__all__ = ["Worker"]


class Worker(GPUWorker):
    """The worker of PlatformFL. Sleep mode's allocator is part of vLLM's extension.

    Before the first request vLLM runs the model in each of the methods below, so a kernel that
    is missing all the same shows here.
    """

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with explained("loading the model"):
            return super().load_model(*args, **kwargs)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with explained("the first run of the model"):
            return super().determine_available_memory(*args, **kwargs)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with explained("making the KV cache"):
            return super().initialize_from_config(*args, **kwargs)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with explained("warming up the model"):
            return super().compile_or_warm_up_model(*args, **kwargs)
