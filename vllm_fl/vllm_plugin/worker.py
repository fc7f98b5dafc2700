# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU worker, with what it takes for granted of CUDA's memory allocator left out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.gpu_worker import Worker as GPUWorker

__all__ = ["Worker"]


class Worker(GPUWorker):
    """The worker of PlatformFL. Sleep mode's allocator is part of vLLM's extension."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
