# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: does an implementation do what its op's contract says?

    report = check_implementation(impl, device="cpu")
    assert report.passed, report

The names below are imported when they are used: pytest imports this package for its plugin, in
every run, and that must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .report import CaseResult, Failure, Kind, Report, Skip, Status

if TYPE_CHECKING:
    from .compare import (
        Difference,
        differences,
        error_in_ulps,
        exact_outputs,
        outputs_of,
        worst_errors,
    )
    from .matrix import Selection, UnknownNameError, check_matrix, select
    from .runner import Runner, check_implementation

__all__ = [
    "CaseResult",
    "Difference",
    "Failure",
    "Kind",
    "Report",
    "Runner",
    "Selection",
    "Skip",
    "Status",
    "UnknownNameError",
    "check_implementation",
    "check_matrix",
    "differences",
    "error_in_ulps",
    "exact_outputs",
    "outputs_of",
    "select",
    "worst_errors",
]

_LAZY = {
    "compare": (
        "Difference",
        "differences",
        "error_in_ulps",
        "exact_outputs",
        "outputs_of",
        "worst_errors",
    ),
    "matrix": ("Selection", "UnknownNameError", "check_matrix", "select"),
    "runner": ("Runner", "check_implementation"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
