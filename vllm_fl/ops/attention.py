# SPDX-License-Identifier: Apache-2.0
"""Attention: the selector of a backend class."""

from __future__ import annotations

from ..dispatch.types import OpSignature
from .contract import OpContract

__all__ = ["ATTENTION_BACKEND", "CONTRACTS"]

ATTENTION_BACKEND = OpSignature.parse(
    "attention_backend(use_mla=False, use_sparse=False)",
    selector=True,
    summary="The dotted path of the attention backend class for this device.",
)

CONTRACTS: tuple[OpContract, ...] = ()
