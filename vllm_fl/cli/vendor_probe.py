# SPDX-License-Identifier: Apache-2.0
"""Imports and registers a vendor's package in a process of its own, and tells what that did.

`python -m vllm_fl.cli.vendor_probe MODULE [BLOCKED ...]` prints one line of JSON. Modules that are
named as blocked cannot be found, as if they were not installed.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from ..dispatch.registry import OpRegistry
from ..dispatch.types import Origin, Rejected

__all__ = ["built_in_registry", "probe"]


class _Blocked:
    """A finder for which some modules do not exist."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return None


def built_in_registry(without: str = "") -> OpRegistry:
    """A registry with what vllm_fl brings, as a plugin finds it in a real process.

    Args:
        without: a module whose own built-ins are left out, because it is what is looked at.
    """
    from ..dispatch.builtin_ops import BUILTIN_MODULES

    registry = OpRegistry()
    registry.plugins = ()  # no discovery: other packages have no say
    for name in BUILTIN_MODULES:
        if name != without and not name.startswith(f"{without}."):
            with registry.batch(Origin("builtin", name)):
                importlib.import_module(name).register_builtins(registry)
    return registry


def probe(module: str, blocked: Sequence[str] = ()) -> dict[str, Any]:
    """Import a package, register it, and ask its backends whether they are available.

    Returns:
        {"error": None or {"type", "text", "traceback"}, "imported": top-level modules that
        registering and asking brought beyond torch's and vllm_fl's own, "availability": impl_id
        to "yes" or the reason, "requires": likewise to what the backend requires, "initialized":
        whether a device was}.
    """
    sys.meta_path.insert(0, _Blocked(blocked))
    import torch  # contracts need it, so it counts for nobody
    import yaml  # noqa: F401  (registering reads policies with it)

    from ..dispatch.discovery import REGISTRARS

    found: dict[str, Any] = {
        "error": None, "imported": [], "availability": {}, "requires": {}, "initialized": False,
    }  # fmt: skip
    registry = built_in_registry(module)
    before = set(sys.modules)
    try:
        package = importlib.import_module(module)
        registrar = next(
            (f for name in REGISTRARS if callable(f := getattr(package, name, None))), None
        )
        if registrar is None:
            raise AttributeError(f"{module} has none of {', '.join(REGISTRARS)}")
        with registry.batch(Origin("module", module)):
            registrar(registry)
        for impls in registry.snapshot().impls_by_op.values():
            for impl in impls:
                if impl.origin is None or impl.origin.source != "module":
                    continue  # a built-in
                verdict = impl.availability()
                said = verdict.reason if isinstance(verdict, Rejected) else "yes"
                who = f"{impl.impl_id} of {impl.op_name}"
                found["availability"][who] = said
                found["requires"][who] = list(getattr(impl.backend, "requires", ()))
    except BaseException as error:
        found["error"] = {
            "type": type(error).__name__,
            "text": str(error),
            "traceback": traceback.format_exc(),
        }
    own = {module.partition(".")[0], "vllm_fl"}
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    found["imported"] = sorted(
        name for name in new - own if name not in sys.stdlib_module_names and name != "torch"
    )
    found["initialized"] = bool(torch.cuda.is_initialized())
    return found


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], sys.argv[2:])))
