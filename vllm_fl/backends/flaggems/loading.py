# SPDX-License-Identifier: Apache-2.0
"""Import FlagGems without its side effects on vLLM and on the process.

What the import of 5.0.2 does beyond defining functions, and what becomes of it here:

    defines old schemas in _C, _moe_C, _vllm_fa3_C and imports vLLM   kept out, and checked
    chooses the vendor by a race of shell commands                    told by GEMS_VENDOR
    fixes multiprocessing's start method                              undone
    prints, and warns of its own deprecations                         to the log at DEBUG
    initialises the device                                            remains: load in the worker
    FLAGGEMS_SOURCE_DIR; folders of its backends behind sys.path;
    modules _<vendor>, hopper, backend_utils; a folder ~/.flaggems    remain
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import multiprocessing.context
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator

import torch

from ...dispatch.log import logger
from .versions import PACKAGES

__all__ = ["import_flaggems"]

_PATCHES = "flag_gems.patches"
_VLLM_NAMESPACES = ("_C", "_moe_C", "_vllm", "_rocm_C")
_lock = threading.Lock()


def import_flaggems(vendor: str) -> tuple[types.ModuleType, ...]:
    """Import what is installed of `PACKAGES`.

    Args:
        vendor: by FlagGems' own name.

    Returns: the modules, in the order in which a symbol is looked for.

    Raises:
        RuntimeError: it defined operators in vLLM's namespaces all the same.
        Exception: whatever the import raised.
    """
    with _lock:
        os.environ.setdefault("GEMS_VENDOR", vendor)
        before = _vllm_operators()
        with _contained():
            modules = tuple(
                importlib.import_module(name)
                for name in PACKAGES
                if name in sys.modules or importlib.util.find_spec(name) is not None
            )
        stale = sorted(_vllm_operators() - before)
        if stale:
            raise RuntimeError(f"importing flag_gems defined operators of vLLM: {stale}")
        return modules


def _vllm_operators() -> set[str]:
    """Names of the operators that are defined in vLLM's namespaces."""
    return {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.partition("::")[0].startswith(_VLLM_NAMESPACES)
    }


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    if _PATCHES not in sys.modules:
        # Stands in the way of the module that defines the operators and imports vLLM.
        stub = types.ModuleType(_PATCHES, "Kept out by vllm_fl.")
        stub.__all__ = []  # type: ignore[attr-defined]
        sys.modules[_PATCHES] = stub
    # One multiprocessing.Lock for each kernel would fix the start method for the process.
    contexts = getattr(multiprocessing.context, "_default_context", None)
    method = getattr(contexts, "_actual_context", None)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        if method is None and contexts is not None:
            contexts._actual_context = None
        for line in (*said.getvalue().splitlines(), *(str(w.message) for w in warned)):
            logger.debug("importing flag_gems: %s", line)
