# SPDX-License-Identifier: Apache-2.0
"""Every error the dispatcher raises. A text says who, expected, found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DispatchError",
    "DispatchFrozen",
    "DuplicateImplementationError",
    "GuardRejected",
    "NoImplementationError",
    "PluginError",
    "RegistrationError",
    "SignatureMismatchError",
    "UnknownOpError",
    "add_note_once",
    "did_you_mean",
]


class DispatchError(Exception):
    """Base class of everything vllm_fl.dispatch raises on purpose."""


class ConfigError(DispatchError, ValueError):
    """A setting is unknown, malformed or contradicts another one."""


class RegistrationError(DispatchError, ValueError):
    """An implementation or declaration was refused by the registry."""


class DuplicateImplementationError(RegistrationError):
    """The pair (op_name, impl_id) is taken."""


class SignatureMismatchError(RegistrationError):
    """A function does not have the parameters its op declares."""


class PluginError(DispatchError, RuntimeError):
    """A plugin failed while strict mode was on."""


class UnknownOpError(DispatchError, LookupError):
    """No op of that name is declared or registered."""


class NoImplementationError(DispatchError, RuntimeError):
    """Every candidate of an op was rejected; the text lists each with its reason."""


class GuardRejected(DispatchError, RuntimeError):
    """Under strict, the first choice's guard rejected the layer or the call."""


class DispatchFrozen(DispatchError, RuntimeError):
    """A decision that a loaded model relies on would have changed."""


_NOTE = "vllm_fl: "


def add_note_once(error: BaseException, note: str) -> None:
    """Say more about an exception that passes by, unless the dispatcher already did. Its own
    errors say it all by themselves."""
    if isinstance(error, DispatchError) or any(
        said.startswith(_NOTE) for said in getattr(error, "__notes__", ())
    ):
        return
    error.add_note(_NOTE + note)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`' Did you mean "x"?'` for the closest valid name, or an empty string."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        lowered = {v.lower(): v for v in names}
        folded = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
        close = [lowered[folded[0]]] if folded else []
    return f' Did you mean "{close[0]}"?' if close else ""
