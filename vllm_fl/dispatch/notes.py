# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher adds to an exception that passes by: whose it is, and for what arguments."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import add_note_once
from .types import OpImpl

__all__ = ["annotate", "annotate_facts", "annotate_guard", "describe_arguments"]


def annotate(
    error: BaseException,
    op_name: str,
    impl_id: str | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Add op, implementation and argument shapes to what an implementation raised."""
    add_note_once(
        error,
        f"raised by implementation '{impl_id}' of op '{op_name}', called with "
        f"{describe_arguments(args, kwargs)}. No other implementation was tried, because the "
        "arguments may already be overwritten. If this is a case that it does not handle, its "
        "`supports` guard should refuse it.",
    )


def annotate_guard(
    error: BaseException,
    impl: OpImpl,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Add to an exception that a guard raised it, whose, where, and what it was asked about.

    Args:
        args, kwargs: the call's arguments, or the layer's facts as `kwargs`.
    """
    asked = f", asked about {describe_arguments(args, kwargs)}" if args or kwargs else ""
    add_note_once(
        error,
        f"raised by a guard of implementation '{impl.impl_id}' of op '{impl.op_name}'"
        f"{_place(error)}{asked}. A guard reads metadata only, and returns True or a reason.",
    )


def annotate_facts(
    error: BaseException, op_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Add to an exception that it was raised while a call's facts were read."""
    add_note_once(
        error,
        f"raised while the facts of op '{op_name}' were read from "
        f"{describe_arguments(args, kwargs)}{_place(error)}; no guard was asked yet",
    )


def _place(error: BaseException) -> str:
    """Where it was raised, unless that is the dispatcher itself."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).parent == Path(__file__).parent:
        return ""
    last = frames[-1]
    return f" ({last.name} in {Path(last.filename).name}, line {last.lineno})"


def describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """The arguments of a call in a line: of tensors dtype, shape and strides."""
    shown = [_shape(value) for value in args]
    shown += [f"{name}={_shape(value)}" for name, value in (kwargs or {}).items()]
    return ", ".join(shown) or "no arguments"


def _shape(value: Any) -> str:
    try:
        shape = getattr(value, "shape", None)
        if shape is None:
            text = repr(value)
            return text if len(text) <= 40 else f"{text[:37]}..."
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        strides = f" strides {list(value.stride())}" if hasattr(value, "stride") else ""
        return f"{dtype}{list(shape)}{strides}"
    except Exception:  # a sparse tensor has no strides; the error that is being told matters more
        return type(value).__name__
