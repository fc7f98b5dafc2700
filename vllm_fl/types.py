# SPDX-License-Identifier: Apache-2.0
"""The types a backend needs, under the short name that in-tree vendor code imports."""

from .dispatch.types import (
    Accepted,
    BackendImplKind,
    BackendPriority,
    DeviceFacts,
    OpImpl,
    OpSignature,
    Rejected,
)

__all__ = [
    "Accepted",
    "BackendImplKind",
    "BackendPriority",
    "DeviceFacts",
    "OpImpl",
    "OpSignature",
    "Rejected",
]
