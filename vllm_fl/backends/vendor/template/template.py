# SPDX-License-Identifier: Apache-2.0
"""The backend: where its kernels run, what they need, and how they are loaded."""

from __future__ import annotations

from ....types import BackendImplKind
from ...base import Backend

__all__ = ["TemplateBackend", "backend"]


class TemplateBackend(Backend):
    """The vendor's kernels."""

    impl_id = "vendor.template"
    kind = BackendImplKind.VENDOR
    vendor = "template"
    device_types = ("cpu",)  # PyTorch's names of the devices that the kernels run on
    api_version = 1  # of vllm_fl's interface, for which this was written
    requires = ("torch",)  # modules that have to be installed; looked up, not imported

    def is_available(self) -> bool | str:
        """True, or the reason why the kernels cannot run here. It imports nothing and touches
        no device: every process asks, also those that fork afterwards."""
        return True

    def load(self) -> None:
        """Import the kernels. It runs once, in the worker, before one of them is first bound; an
        exception makes the backend unavailable, with the exception as the reason."""


backend = TemplateBackend()
