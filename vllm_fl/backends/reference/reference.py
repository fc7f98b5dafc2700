# SPDX-License-Identifier: Apache-2.0
"""The reference backend."""

from __future__ import annotations

from ...dispatch.types import BackendImplKind
from ..base import Backend

__all__ = ["ReferenceBackend", "backend"]


class ReferenceBackend(Backend):
    """Plain PyTorch, equal to vLLM's forward_native bit for bit."""

    impl_id = "reference.torch"
    kind = BackendImplKind.REFERENCE
    requires = ("torch",)


backend = ReferenceBackend()
