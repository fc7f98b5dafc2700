# SPDX-License-Identifier: Apache-2.0
"""What FlagGems 5.0.2 needs on Triton 3.7 and later (FlagGems issue #3353): two settings that
it reads at each call, so that they work after its import and can be taken back.

Kernels that make block pointers by hand are not reached; Triton 3.9 has none of these.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["WHAT", "apply", "revert"]

WHAT = "constants are passed by position, generated kernels use no block pointers"

_LAST_KNOWN_MINOR = 6
_before: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Change the two settings; a second call changes nothing."""
    if _before:
        return
    from flag_gems.utils.codegen_config_utils import get_codegen_config

    # Not an attribute of flag_gems.utils: there the decorator of that name is in the way.
    libentry = importlib.import_module("flag_gems.utils.libentry")
    for owner, name, value in (
        (libentry, "minor_version", _LAST_KNOWN_MINOR),
        (get_codegen_config(), "prefer_block_pointer", False),
    ):
        _before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def revert() -> None:
    """Put back what was there before `apply`."""
    while _before:
        owner, name, value = _before.pop()
        setattr(owner, name, value)
