# SPDX-License-Identifier: Apache-2.0
"""The attention backend class that vLLM has for CPUs."""

from __future__ import annotations

from ..cpu import backend


def _supports(use_mla: bool = False, use_sparse: bool = False) -> bool | str:
    if use_mla or use_sparse:
        return "vLLM's CPU attention has neither MLA nor sparse attention"
    return True


@backend.implements(supports=_supports)
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The dotted path of the class."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.get_path()
