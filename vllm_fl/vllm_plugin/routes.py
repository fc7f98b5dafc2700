# SPDX-License-Identifier: Apache-2.0
"""The route table of a worker: for each op what serves it, in how many layers and functions of
vLLM, how often."""

from __future__ import annotations

import os
from typing import Any

from ..dispatch.default import get_default_manager
from ..dispatch.log import logger
from ..dispatch.policy import NATIVE
from .functions.serve import ServedFunction
from .functions.serve import records as functions
from .layers.serve import ServedLayer, records

__all__ = ["RPC_NAME", "merge_rows", "route_rows", "rpc"]

RPC_NAME = "vllm_fl_dispatch"
"""The worker's method for `collective_rpc`."""

_REPLACED = "somebody pointed its forward elsewhere after it was built"
_REPLACED_FUNCTION = "somebody replaced it after it was bound"


def _sites() -> list[ServedLayer | ServedFunction]:
    layers = [record for record in list(records) if record.layer() is not None]
    return [*layers, *(record for record in list(functions) if record.listed)]


def route_rows() -> list[dict[str, Any]]:
    """One row per op, implementation and mode, JSON-ready.

    Keys: op, impl_id, kind, mode, bound (to how many layers and functions), calls (counted
    since counting was switched on), reason, rejected (a list of {"impl_id", "reason"}).
    """
    return _rows_of(_sites())


def _rows_of(sites: list[ServedLayer | ServedFunction]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    counted: set[int] = set()  # layers share their counts where they share a graph's binding
    for record in sites:
        replaced = _REPLACED if isinstance(record, ServedLayer) else _REPLACED_FUNCTION
        for served in record.ops:
            binding = served.binding
            if binding is None or record.replaced:
                reason = replaced if record.replaced else served.native_reason
                row = _row(rows, served.op, NATIVE, NATIVE, record.mode, reason)
                row["bound"] += 1
                continue
            winner = binding.decision.winner
            assert winner is not None
            kinds = {impl.impl_id: impl.kind.value for impl in binding.decision.candidates}
            row = _row(
                rows, served.op, winner.impl_id, winner.kind.value, record.mode,
                binding.decision.reason,
            )  # fmt: skip
            row["bound"] += 1
            # Those for other devices are no candidates here; `explain` names them.
            here = [r for r in binding.decision.rejected() if r.code != "device"]
            _reject(row, ((r.impl_id, r.reason) for r in here))
            for impl_id, reasons in binding.call_rejections.items():
                _reject(row, ((impl_id, f"some calls: {reason}") for reason in reasons))
            if id(served.calls) in counted:
                continue
            counted.add(id(served.calls))
            for impl_id, calls in served.calls.items():
                reason = (
                    binding.decision.reason
                    if impl_id == winner.impl_id
                    else f"calls that {winner.impl_id} refuses"
                )
                _row(rows, served.op, impl_id, kinds[impl_id], record.mode, reason)["calls"] += (
                    calls
                )
    return [rows[key] for key in sorted(rows)]


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
        sites: list[ServedLayer | ServedFunction] = [*records, *functions]
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
