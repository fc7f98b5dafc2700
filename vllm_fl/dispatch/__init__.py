# SPDX-License-Identifier: Apache-2.0
"""The dispatch core. Imports neither torch nor vLLM nor any backend."""

from .config import Config, load_config
from .decision import Decision, decide
from .default import (
    call_op,
    explain_op,
    get_default_manager,
    reset_default_manager,
    resolve_op,
)
from .discovery import PluginRecord
from .errors import (
    ConfigError,
    DispatchError,
    DispatchFrozen,
    DuplicateImplementationError,
    GuardRejected,
    NoImplementationError,
    PluginError,
    RegistrationError,
    SignatureMismatchError,
    UnknownOpError,
)
from .manager import OpManager
from .policy import (
    SelectionPolicy,
    policy_context,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from .registry import OpRegistry, OpRegistrySnapshot
from .types import (
    Accepted,
    BackendImplKind,
    BackendPriority,
    DeviceFacts,
    OpImpl,
    OpSignature,
    Rejected,
)


def get_discovered_plugins() -> tuple[PluginRecord, ...]:
    """What the default manager's discovery ran, with versions, durations and errors."""
    return get_default_manager().get_discovered_plugins()


__all__ = [
    "Accepted",
    "BackendImplKind",
    "BackendPriority",
    "Config",
    "ConfigError",
    "Decision",
    "DeviceFacts",
    "DispatchError",
    "DispatchFrozen",
    "DuplicateImplementationError",
    "GuardRejected",
    "NoImplementationError",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "OpSignature",
    "PluginError",
    "PluginRecord",
    "RegistrationError",
    "Rejected",
    "SelectionPolicy",
    "SignatureMismatchError",
    "UnknownOpError",
    "call_op",
    "decide",
    "explain_op",
    "get_default_manager",
    "get_discovered_plugins",
    "load_config",
    "policy_context",
    "reset_default_manager",
    "resolve_op",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
