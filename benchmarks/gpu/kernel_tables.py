# SPDX-License-Identifier: Apache-2.0
"""The tables and verdicts of `kernels.py`, from its JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from about import headline, table

__all__ = ["EXTRA", "GOALS", "goals", "markdown", "summary", "verdict"]

Row = dict[str, Any]

DECODE = ("silu_and_mul", "fused_add_rms_norm")
DECODE_TOKENS = 32
NEAR_EMPTY = 0.3
LARGE = 200_000_000
SHOWN = 30
COLUMNS = (
    *("ours", "vllm", "flaggems"),
    *("ours, separate", "vllm, separate", "flaggems, separate"),
    "torch.compile",
)
EXTRA = ("gelu_and_mul", "mul_and_silu", "gemma_rms_norm", "fused_add_gemma_rms_norm")

OURS_TO_VLLM = "at most 1.02 of vLLM's time"
DECODE_GOAL = "at most 32 tokens: 1.3 times as fast as vLLM, or within 0.3 us of an empty kernel"
COPY_GOAL = "200 MB and more: at least 95 % of a copy's speed"
ROPE_GOAL = "rope: at least 1.2 times as fast as vLLM"
FUSION_GOAL = "q/k norm and rope in one: faster than the fastest separate kernels"
INDUCTOR_GOAL = "q/k norm and rope in one: no slower than Inductor's fusion"


def ratio(row: Row, above: str, below: str) -> float | None:
    """One column over another."""
    us = row["us"]
    return us[above] / us[below] if above in us and below in us else None


def _decode(row: Row) -> float | None:
    """How near the goal is: 1 and more is there."""
    us = row["us"]
    if row["group"] not in DECODE or row["tokens"] > DECODE_TOKENS or "ours" not in us:
        return None
    over_empty = us["ours"] - us["empty"]
    near = NEAR_EMPTY / over_empty if over_empty > 0 else math.inf
    faster = ratio(row, "vllm", "ours")
    return max(near, faster / 1.3) if faster is not None else near


def _fusion(row: Row) -> float | None:
    separate = [us for column, us in row["us"].items() if column.endswith(", separate")]
    return min(separate) / row["us"]["ours"] if separate and "ours" in row["us"] else None


GOALS: dict[str, tuple[Callable[[Row], float | None], float, bool]] = {
    OURS_TO_VLLM: (lambda r: ratio(r, "ours", "vllm"), 1.02, False),
    DECODE_GOAL: (_decode, 1.0, True),
    COPY_GOAL: (lambda r: ratio(r, "copy", "ours") if r["moved"] >= LARGE else None, 0.95, True),
    ROPE_GOAL: (
        lambda r: ratio(r, "vllm", "ours") if r["group"] == "rotary_embedding" else None, 1.2, True,
    ),
    FUSION_GOAL: (_fusion, 1.0, True),
    INDUCTOR_GOAL: (
        lambda r: ratio(r, "torch.compile", "ours") if r["group"] == "fused_qk_norm_rope" else None,
        1.0, True,
    ),
}  # fmt: skip
"""Goal to the number that a row gives (None: it is not about that row), its limit, and whether the
number has to be at least that."""


def _met(value: float, limit: float, at_least: bool) -> bool:
    return value >= limit if at_least else value <= limit


def verdict(row: Row) -> list[str]:
    """The goals that a row misses, each with its number."""
    short = {
        OURS_TO_VLLM: "of vLLM", DECODE_GOAL: "decode", COPY_GOAL: "of copy", ROPE_GOAL: "rope",
        FUSION_GOAL: "of separate", INDUCTOR_GOAL: "of Inductor",
    }  # fmt: skip
    found = []
    for name, (measure, limit, at_least) in GOALS.items():
        value = measure(row)
        if value is not None and not _met(value, limit, at_least):
            found.append(f"{short[name]} {value:.3f}")
    return found


def goals(rows: list[Row]) -> list[dict[str, Any]]:
    """For each goal: how many rows it is about, how many miss it, and the worst."""
    found = []
    for name, (measure, limit, at_least) in GOALS.items():
        values = [(value, row) for row in rows if (value := measure(row)) is not None]
        if not values:
            found.append({"goal": name, "rows": 0, "missed": 0})
            continue
        worst, row = (min if at_least else max)(values, key=lambda pair: pair[0])
        missed = sum(not _met(value, limit, at_least) for value, _ in values)
        found.append(
            {
                "goal": name, "rows": len(values), "missed": missed, "worst": round(worst, 4),
                "where": f"{row['group']}, {row['dtype']}, {row['size']}, {row['tokens']} tokens",
            }
        )  # fmt: skip
    return found


def _us(row: Row, column: str) -> str:
    value = row["us"].get(column)
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = "other gated activations and norms" if row["group"] in EXTRA else row["group"]
        groups.setdefault(name, []).append(row)
    return groups


def _host(row: Row, column: str) -> str:
    value = row["host_us"].get(column)
    return "-" if value is None else f"{value:.1f}"


def _name(column: str, ids: dict[str, str]) -> str:
    """A column's heading: the implementation's id."""
    role, comma, rest = column.partition(",")
    return ids.get(role, role) + comma + rest


def _table_of(name: str, rows: list[Row], ids: dict[str, str]) -> str:
    columns = [c for c in COLUMNS if any(c in row["us"] for row in rows)]
    several = len({row["op"] for row in rows}) > 1
    lines = []
    for row in rows:
        cells = [row["op"]] if several else []
        cells += [row["dtype"], str(row["size"]), str(row["tokens"]), f"{row['moved'] / 1e6:.2f}"]
        cells += [_us(row, column) for column in (*columns, "empty", "copy")]
        cells += [_share(ratio(row, "ours", "vllm")), _share(ratio(row, "copy", "ours"))]
        lines.append([*cells, "; ".join(verdict(row)) or ("met" if "ours" in row["us"] else "-")])
    titles = [*(["op"] if several else []), "dtype", "size", "tokens", "MB"]
    titles += [_name(column, ids) for column in columns]
    titles += ["empty", "copy", "ours / vLLM", "of copy", "goals"]
    return f"### {name}\n\n{table(titles, lines)}"


def _host_table(rows: list[Row], ids: dict[str, str]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row["host_us"]))
    lines = [[row["group"], row["dtype"], *(_host(row, c) for c in columns)] for row in rows]
    title = "### Host microseconds a call, outside of graphs, 32 tokens, guards included"
    return f"{title}\n\n{table(['op', 'dtype', *(_name(c, ids) for c in columns)], lines)}"


def _reasons(rows: list[Row], ids: dict[str, str]) -> str:
    reasons: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        for column, why in row["why"].items():
            reasons[row["group"], _name(column, ids), why.replace("\n", " ")[:160]] += 1
    lines = [[op, who, str(count), why] for (op, who, why), count in reasons.items()]
    return f"### Not measured\n\n{table(['op', 'who', 'rows', 'why'], lines)}"


def _goals(rows: list[Row]) -> str:
    lines = [
        [g["goal"], str(g["rows"]), str(g["missed"]), str(g.get("worst", "-")), g.get("where", "-")]
        for g in goals(rows)
    ]
    return f"### Goals\n\n{table(['goal', 'rows', 'missed', 'worst', 'where'], lines)}"


def _left_out(report: dict[str, Any]) -> list[str]:
    late = report["left_out"]
    return [f"Out of time: {len(late)} rows, {late[0]} first."] if late else []


def markdown(report: dict[str, Any]) -> str:
    """Everything, the goals last."""
    rows, ids = report["rows"], report["columns"]
    parts = [
        f"{headline(report['about'])} `{report['about']['command']}`, {report.get('seconds')} s.",
        "GPU microseconds a call in a graph, the median of 3 rounds; MB: what a call reads and "
        "writes; of copy: the speed beside that of a copy of as many bytes.",
    ]
    parts += [_table_of(name, found, ids) for name, found in _groups(rows).items()]
    if host := [row for row in rows if row["host_us"]]:
        parts.append(_host_table(host, ids))
    if any(row["why"] for row in rows):
        parts.append(_reasons(rows, ids))
    return "\n\n".join([*parts, *_left_out(report), _goals(rows)]) + "\n"


def summary(report: dict[str, Any]) -> str:
    """What fits a terminal: the rows that miss a goal, the reasons, the goals."""
    rows, ids = report["rows"], report["columns"]
    missed = [row for row in rows if verdict(row)]
    parts = [_table_of(f"{len(missed)} rows miss a goal", missed[:SHOWN], ids)] if missed else []
    if any(row["why"] for row in rows):
        parts.append(_reasons(rows, ids))
    return "\n\n".join([*parts, *_left_out(report), _goals(rows)]) + "\n"
