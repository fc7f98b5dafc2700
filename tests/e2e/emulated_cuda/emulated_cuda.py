# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA compile path, on CPU.

On CUDA vLLM compiles in mode VLLM_COMPILE: piecewise, ahead of time, from a cache that is looked
up before anything is traced. Its CPU platform rewrites that mode to one that always recompiles,
which hides a stale artifact. This plugin of vLLM (put its folder on PYTHONPATH) keeps the mode.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """The entry point `vllm.general_plugins: fl_emulated_cuda`."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if getattr(original, "emulates_cuda", False):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        asked_for = vllm_config.compilation_config.mode
        original(cls, vllm_config)
        if asked_for == CompilationMode.VLLM_COMPILE:
            vllm_config.compilation_config.mode = asked_for

    check_and_update_config.emulates_cuda = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    # This pass names operators that only the CUDA extension has; here there is nothing to fix.
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

    FixFunctionalizationPass.__call__ = lambda self, graph: None  # type: ignore[method-assign]
