# SPDX-License-Identifier: Apache-2.0
"""The route table of a worker: for each op what serves it, in how many layers, functions and
modules of vLLM, how often."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..dispatch.binding import Binding
from ..dispatch.default import get_default_manager
from ..dispatch.log import logger
from ..dispatch.policy import NATIVE
from ..dispatch.types import OpImpl
from .functions.serve import ServedFunction
from .functions.serve import records as functions
from .fusions.serve import ServedModule, fused_layers
from .fusions.serve import records as modules
from .layers.serve import ServedLayer, ServedOp, records

__all__ = ["RPC_NAME", "merge_rows", "route_rows", "rpc"]

RPC_NAME = "vllm_fl_dispatch"
"""The worker's method for `collective_rpc`."""

_REPLACED = "somebody pointed its forward elsewhere after it was built"
_REPLACED_FUNCTION = "somebody replaced it after it was bound"


_Site = ServedLayer | ServedModule | ServedFunction


def _sites() -> list[_Site]:
    built: list[ServedLayer | ServedModule] = [*records, *modules]
    listed = [record for record in list(functions) if record.listed]
    return [*(record for record in built if record.layer() is not None), *listed]


def route_rows() -> list[dict[str, Any]]:
    """One row per op, implementation and mode, JSON-ready.

    Keys: op, impl_id, kind, mode, bound (to how many layers, functions and modules), calls
    (counted since counting was switched on), reason, rejected (a list of {"impl_id", "reason"}).
    A layer that a module's op does in one with others is in a row of its own.
    """
    return _rows_of(_sites())


def _rows_of(sites: list[_Site]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    counted: set[int] = set()  # layers share their counts where they share a graph's binding
    fused = fused_layers()
    for record in sites:
        replaced = _REPLACED_FUNCTION if isinstance(record, ServedFunction) else _REPLACED
        for served in record.ops:
            binding = served.binding
            whole = _whole(record, served, fused)
            if whole is not None:
                reason = f"part of {whole.op_name}"
                _row(rows, served.op, whole.impl_id, whole.kind.value, record.mode, reason)[
                    "bound"
                ] += 1
            elif binding is None or record.replaced:
                reason = replaced if record.replaced else served.native_reason
                _row(rows, served.op, NATIVE, NATIVE, record.mode, reason)["bound"] += 1
                continue
            else:
                row = _row(rows, served.op, *_winner(binding), record.mode, binding.decision.reason)
                row["bound"] += 1
                # Those for other devices are no candidates here; `explain` names them.
                here = [r for r in binding.decision.rejected() if r.code != "device"]
                _reject(row, ((r.impl_id, r.reason) for r in here))
                for impl_id, reasons in binding.call_rejections.items():
                    _reject(row, ((impl_id, f"some calls: {reason}") for reason in reasons))
            if binding is not None and id(served.calls) not in counted:
                counted.add(id(served.calls))
                _count(rows, served, binding, record.mode)
    return [rows[key] for key in sorted(rows)]


def _whole(
    record: _Site, served: ServedOp, fused: Mapping[tuple[int, str], ServedModule]
) -> OpImpl | None:
    """What serves an op of a layer as part of a module's op, or None."""
    if not isinstance(record, ServedLayer):
        return None
    module = fused.get((id(record.layer()), served.op))
    binding = None if module is None else module.ops[0].binding
    return None if binding is None else binding.decision.winner


def _winner(binding: Binding) -> tuple[str, str]:
    """Its id and kind."""
    winner = binding.decision.winner
    assert winner is not None
    return winner.impl_id, winner.kind.value


def _count(
    rows: dict[tuple[str, str, str, str], dict[str, Any]],
    served: ServedOp,
    binding: Binding,
    mode: str,
) -> None:
    """Add an op's calls to the rows of the implementations that took them."""
    chosen, _ = _winner(binding)
    kinds = {impl.impl_id: impl.kind.value for impl in binding.decision.candidates}
    for impl_id, calls in served.calls.items():
        reason = binding.decision.reason if impl_id == chosen else f"calls that {chosen} refuses"
        _row(rows, served.op, impl_id, kinds[impl_id], mode, reason)["calls"] += calls


def _row(
    rows: dict[tuple[str, str, str, str], dict[str, Any]],
    op: str,
    impl_id: str,
    kind: str,
    mode: str,
    reason: str,
) -> dict[str, Any]:
    return rows.setdefault(
        (op, impl_id, mode, reason),
        {
            "op": op,
            "impl_id": impl_id,
            "kind": kind,
            "mode": mode,
            "bound": 0,
            "calls": 0,
            "reason": reason,
            "rejected": [],
        },
    )


def _reject(row: dict[str, Any], refusals: Any) -> None:
    for impl_id, reason in refusals:
        entry = {"impl_id": impl_id, "reason": reason}
        if entry not in row["rejected"]:
            row["rejected"].append(entry)


def merge_rows(tables: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One table from those of several workers: bound and calls add up."""
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for table in tables:
        for row in table:
            merged = _row(rows, row["op"], row["impl_id"], row["kind"], row["mode"], row["reason"])
            merged["bound"] += row["bound"]
            merged["calls"] += row["calls"]
            _reject(merged, ((r["impl_id"], r["reason"]) for r in row["rejected"]))
    return [rows[key] for key in sorted(rows)]


def log_summary() -> None:
    """One line: what serves each op of the model that was just loaded."""
    # Of the functions that stay native most models call few, and the table has them all.
    sites = [s for s in _sites() if not (isinstance(s, ServedFunction) and not s.called)]
    rows = _rows_of(sites)
    parts = [f"{row['op']} -> {row['impl_id']} x{row['bound']}" for row in rows if row["bound"]]
    logger.info("model loaded: %s", ", ".join(parts) or "no layer that vllm_fl knows")


def rpc(worker: Any, request: str = "routes") -> dict[str, Any]:
    """Answer `collective_rpc("vllm_fl_dispatch", args=(request,))`.

    Args:
        request: "routes", "count" (start counting calls from zero) or "uncount" (stop).

    Returns:
        {"pid", "rank", "device", "frozen", "ops"}, or {"error"}: it never raises, because an
        exception would leave the engine waiting for the other ranks' replies.
    """
    try:
        if request not in ("routes", "count", "uncount"):
            return {"error": f"unknown request {request!r}; valid: routes, count, uncount"}
        sites: list[_Site] = [*records, *modules, *functions]
        for record in sites if request != "routes" else ():
            if request == "count":
                for served in record.ops:
                    served.calls.clear()
            record.set_counting(request == "count")
        manager = get_default_manager()
        return {
            "pid": os.getpid(),
            "rank": int(getattr(worker, "rank", 0)),
            "device": manager.device.device_class,
            "frozen": manager.frozen,
            "ops": route_rows(),
        }
    except Exception as error:
        logger.exception("%s(%r) failed", RPC_NAME, request)
        return {"error": f"{type(error).__name__}: {error}"}
