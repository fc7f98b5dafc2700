# SPDX-License-Identifier: Apache-2.0
"""The attention backend class: vllm-ascend's, while its platform is the one that vLLM chose.

Its classes read vllm-ascend's own configuration, which only its platform sets up; another
platform must not hand them out.
"""

from __future__ import annotations

from ..ascend import backend
from ..beside import platform_is_active

CLASSES = {
    (False, False): "vllm_ascend.attention.attention_v1.AscendAttentionBackend",
    (True, False): "vllm_ascend.attention.mla_v1.AscendMLABackend",
    (True, True): "vllm_ascend.attention.sfa_v1.AscendSFABackend",
}
"""(use_mla, use_sparse) to the dotted path of the class."""


def _supports(use_mla: bool = False, use_sparse: bool = False) -> bool | str:
    if not platform_is_active():
        return "vllm-ascend's platform is not the one that vLLM chose, and its classes need it"
    return (use_mla, use_sparse) in CLASSES or "sparse attention exists with MLA only"


@backend.implements(supports=_supports)
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The dotted path of the class."""
    return CLASSES[use_mla, use_sparse]
