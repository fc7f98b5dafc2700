# SPDX-License-Identifier: Apache-2.0
"""Attention: the selector of a backend class."""

from __future__ import annotations

from ..dispatch.types import OpSignature

__all__ = ["ATTENTION_BACKEND"]

ATTENTION_BACKEND = OpSignature.parse(
    "attention_backend(use_mla=False, use_sparse=False)",
    selector=True,
    summary="The dotted path of the attention backend class for this device.",
)
