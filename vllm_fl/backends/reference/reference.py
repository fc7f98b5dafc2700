# SPDX-License-Identifier: Apache-2.0
"""The reference backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dispatch.types import BackendImplKind
from ...ops.contract import OpContract
from ..base import Backend

__all__ = ["ReferenceBackend", "backend"]


class ReferenceBackend(Backend):
    """Plain PyTorch, equal to vLLM's forward_native bit for bit."""

    impl_id = "reference.torch"
    kind = BackendImplKind.REFERENCE
    requires = ("torch",)

    def serves(self, contract: OpContract) -> Callable[..., Any]:
        """Mark a contract's reference as the implementation, and return it."""
        return self.implements(contract.name)(contract.reference)


backend = ReferenceBackend()
