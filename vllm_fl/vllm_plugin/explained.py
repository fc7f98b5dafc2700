# SPDX-License-Identifier: Apache-2.0
"""Errors about kernels of vLLM's extension, told as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["explained"]

_MISSING = ("'_OpNamespace' '_", "'_C::", "'_moe_C::", "'_C_cache_ops::")
"""How PyTorch speaks of an operator of vLLM's extensions that is not there, or has no kernel."""


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Say what is behind an error about an operator of vLLM's extension.

    Raises:
        RuntimeError: in its place, with the error as its cause.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if any(mark in text for mark in _MISSING):
            why = f"it reached a kernel of vLLM's compiled extension, which is not here ({text})"
        elif isinstance(error, NotImplementedError) and not text:
            why = "vLLM knows how to do this on its own platforms only (see the traceback)"
        else:
            raise
        raise RuntimeError(
            f"vllm_fl's platform cannot serve this model: {doing} failed, because {why}; use a "
            "vLLM with its compiled extension, or the vendor's own platform plugin"
        ) from error
