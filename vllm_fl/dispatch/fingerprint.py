# SPDX-License-Identifier: Apache-2.0
"""One hash of everything that decides which code runs: equal in all ranks, stable over time."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from .. import __version__
from .decision import describe_policy, order_candidates
from .policy import MODES, SelectionPolicy
from .registry import OpRegistrySnapshot
from .types import DeviceFacts, OpImpl

__all__ = ["fingerprint"]


def fingerprint(
    snapshot: OpRegistrySnapshot,
    policy: SelectionPolicy,
    device: DeviceFacts,
    *,
    extra: Iterable[str] = (),
) -> str:
    """64 hex digits over policy, ordered candidates, their packages and sources, and device.

    Args:
        extra: further facts that decide, e.g. the names of patched vLLM functions.
    """
    ops: dict[str, Any] = {}
    for op_name, impls in snapshot.impls_by_op.items():
        for mode in MODES:
            ordered, left_out = order_candidates(op_name, impls, policy, device, mode)
            ops[f"{op_name}@{mode}"] = {
                "order": [c if isinstance(c, str) else _identity(c) for c in ordered],
                "left_out": [impl.impl_id for impl in left_out],
            }
    facts = {
        "vllm_fl": __version__,
        "policy": {k: v["value"] for k, v in describe_policy(None, policy, {}).items()},
        "device": device.device_class,
        "ops": ops,
        "extra": sorted(extra),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _identity(impl: OpImpl) -> list[str]:
    origin = impl.origin
    package = f"{origin.package} {origin.version}" if origin is not None else ""
    guards = (impl.fn, impl.supports_layer, impl.supports)
    marks = (str(int(impl.priority)), ",".join(impl.mutates), str(impl.batch_invariant))
    return [impl.impl_id, *marks, package, *map(_source_hash, guards)]


def _source_hash(function: Any) -> str:
    """Hash of the file that defines a function, or the class of a callable object; empty where
    there is none (built-ins)."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    for owner in (function, type(function)):
        try:
            path = inspect.getsourcefile(owner)
        except TypeError:
            continue
        if path:
            return _file_hash(path)
    return ""


@lru_cache(maxsize=256)
def _file_hash(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return ""
