# SPDX-License-Identifier: Apache-2.0
"""The tables of a folder of results, from its files. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_tables
from about import headline, table
from plan import MODES, REPEATS

__all__ = ["distance", "text_of"]

Result = dict[str, Any]

WHO = {
    "stock": "stock vLLM",
    "stock-runner1": "stock vLLM, first runner",
    "plugin": "plugin, shipped policy",
    "plugin-nogems": "plugin, shipped policy, no FlagGems",
    "pages": "plugin, shipped policy, cache writes left to vLLM",
    "unfused": "plugin, shipped policy, q/k norm and rope apart",
    "vllm": "plugin, vLLM's kernels",
    "flagos": "plugin, VLLM_FL_PREFER=flagos",
    "vendor": "plugin, VLLM_FL_PREFER=vendor",
    "empty": "`empty` build, PlatformFL, second runner",
    "empty-runner1": "`empty` build, PlatformFL, first runner",
    "empty-nogems": "`empty` build, PlatformFL, second runner, no FlagGems",
}
"""The end of a result's name, and what it means."""

BATCHES = ("batch_1", "batch_32")
BESIDE_STOCK = 1.01
FASTER = 0.94
FAILURES = 40


def distance(a: Result, b: Result) -> dict[str, Any]:
    """Between the answers of two results: mean and largest difference of the log-probabilities of
    the prompts, and how many of the sequences are the same."""
    pairs = zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)
    gaps = [abs(x - y) for p, q in pairs for x, y in zip(p, q, strict=True)]
    same = sum(p == q for p, q in zip(a["tokens"], b["tokens"], strict=True))
    return {
        "mean": statistics.mean(gaps),
        "largest": max(gaps),
        "same": same,
        "of": len(a["tokens"]),
    }


def load(path: Path) -> Result | None:
    """A result, or None where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def engines(results: Path) -> dict[tuple[str, str, str], Result]:
    """(shape, mode, who) to the result of an engine, in the order of the tables."""
    found = {}
    for shape in ("q06", "q4", "moe"):
        for mode in MODES:
            for who in WHO:
                name = f"{shape}-{mode}-{who}"
                result = load(results / f"{name}.json")
                if result is not None and "prompt_logprobs" in result:
                    others = [load(results / f"{name}-{repeat}.json") for repeat in REPEATS]
                    found[shape, mode, who] = median_of(result, others)
    return found


def median_of(result: Result, others: list[Result | None]) -> Result:
    """The result with the median time of its process and of those that repeated it."""
    again = [other for other in others if other is not None]
    if not again:
        return result
    merged = {**result, "processes": 1 + len(again)}
    for batch in BATCHES:
        times = [r[batch]["us_per_step"] for r in (result, *again) if batch in r]
        if times:
            merged[batch] = {**result[batch], "us_per_step": statistics.median(times)}
            merged[batch]["all_us_per_step"] = times
    return merged


def served(result: Result) -> str:
    """The implementations that serve anything."""
    rows = [row for reply in result.get("routes", []) for row in reply.get("ops", [])]
    count: Counter[str] = Counter()
    for row in rows:
        if row["bound"]:
            count[row["impl_id"]] += 1
    return ", ".join(f"{impl} ({ops})" for impl, ops in count.most_common()) or "-"


def _us(result: Result, key: str = "us_per_step") -> str:
    values = [result.get(batch, {}).get(key) for batch in BATCHES]
    return " / ".join("-" if v is None else f"{v:g}" for v in values)


def ratios(result: Result, stock: Result | None) -> list[float | None]:
    """GPU time per step over stock's, batch 1 and 32."""
    found: list[float | None] = []
    for batch in BATCHES:
        a, b = (r.get(batch, {}).get("us_per_step") if r else None for r in (result, stock))
        found.append(a / b if a and b else None)
    return found


def noise(found: dict[tuple[str, str, str], Result], shape: str) -> float | None:
    """The mean distance between stock's two right answers: with Inductor and without."""
    pair = found.get((shape, "graph", "stock")), found.get((shape, "decode-graph", "stock"))
    return distance(*pair)["mean"] if pair[0] and pair[1] else None


def to_float32(results: Path, found: dict[tuple[str, str, str], Result]) -> str:
    """How far each engine is from stock vLLM in float32 with the same weights."""
    rows = []
    for (shape, mode, who), result in found.items():
        exact = load(results / f"{shape}-eager-float32.json")
        if exact is not None:
            apart = distance(result, exact)
            rows.append([shape, mode, WHO[who], f"{apart['mean']:.4f}", f"{apart['largest']:.3f}"])
    if not rows:
        return ""
    columns = ["shape", "mode", "vLLM", "mean d logprob", "largest"]
    return f"### Distance to float32\n\n{table(columns, rows)}"


def model_table(found: dict[tuple[str, str, str], Result]) -> str:
    """A row for each engine."""
    rows = []
    for (shape, mode, who), result in found.items():
        stock = found.get((shape, mode, "stock"))
        usual = found.get((shape, "graph", "stock"))
        apart = distance(result, stock) if stock and stock is not result else None
        from_usual = distance(result, usual) if usual and usual is not result else None
        beside = [] if who == "stock" else ratios(result, stock)
        rows.append(
            [
                shape, mode, WHO[who], served(result), _us(result),
                " / ".join("-" if r is None else f"{r:.3f}" for r in beside) or "-",
                _us(result, "kernels_per_step"), _us(result, "tok_per_s"),
                f"{apart['mean']:.4f}" if apart else "-",
                f"{apart['same']}/{apart['of']}" if apart else "-",
                f"{from_usual['mean']:.4f}" if from_usual else "-",
            ]
        )  # fmt: skip
    columns = [
        "shape", "mode", "vLLM", "served by (ops)", "GPU us per step", "of stock",
        "kernels per step", "tok/s, one run", "mean d logprob", "same sequences",
        "d to usual stock",
    ]  # fmt: skip
    text = (
        "GPU microseconds per decode step (torch.profiler, kernels only, median of 3; where an "
        "engine was measured in three processes, of those), batch 1 / 32. Distances are to stock "
        "in the same mode, and to stock as vLLM runs it, with Inductor; "
        "between these two stocks lies the noise between right answers."
    )
    return f"### Whole models\n\n{text}\n\n{table(columns, rows)}"


def _worst(
    found: dict[tuple[str, str, str], Result],
    chosen: Callable[[str, str, str], bool],
    measure: Callable[[tuple[str, str, str], Result], list[float]],
) -> tuple[float, str, int] | None:
    values = [
        (value, " ".join(key))
        for key, result in found.items()
        if chosen(*key)
        for value in measure(key, result)
    ]
    return (*max(values), len(values)) if values else None


def model_goals(found: dict[tuple[str, str, str], Result]) -> list[list[str]]:
    """Goal, limit, worst value, where, how many values, verdict."""

    def to_stock(key: tuple[str, str, str], result: Result) -> list[float]:
        stock = found.get((key[0], key[1], "stock"))
        return [r for r in ratios(result, stock) if r is not None]

    def apart(key: tuple[str, str, str], result: Result) -> list[float]:
        stock = found.get((key[0], key[1], "stock"))
        if key[2] == "empty-runner1":
            stock = found.get((key[0], key[1], "stock-runner1"), stock)
        return [distance(result, stock)["mean"]] if stock else []

    def over_noise(key: tuple[str, str, str], result: Result) -> list[float]:
        floor = noise(found, key[0])
        return [d / floor for d in apart(key, result)] if floor else []

    def usual_over_noise(key: tuple[str, str, str], result: Result) -> list[float]:
        return over_noise((key[0], "graph", key[2]), result)

    plain = ("eager", "decode-graph")
    dense = ("q06", "q4")
    goals: list[tuple[str, float, Any, Any]] = [
        ("plugin beside stock: GPU time", BESIDE_STOCK,
         lambda s, m, w: w.startswith("plugin") and s in dense, to_stock),
        ("plugin without Inductor: 6 % below stock", FASTER,
         lambda s, m, w: w == "plugin" and m in plain and s in dense, to_stock),
        ("`empty` under Inductor: distance to stock", 0.0,
         lambda s, m, w: w.startswith("empty") and m == "graph" and s in dense, apart),
        ("`empty` in the decode graph: GPU time", 1.0,
         lambda s, m, w: w.startswith("empty") and m == "decode-graph" and s in dense, to_stock),
        ("distance to stock in the same mode over the noise", 1.0,
         lambda s, m, w: not w.startswith("stock"), over_noise),
        ("distance to stock as vLLM runs it (Inductor) over the noise", 1.0,
         lambda s, m, w: not w.startswith("stock"), usual_over_noise),
    ]  # fmt: skip
    rows = []
    for name, limit, chosen, measure in goals:
        worst = _worst(found, chosen, measure)
        if worst is None:
            rows.append([name, f"{limit:g}", "-", "-", "0", "not measured"])
            continue
        value, where, count = worst
        verdict = "met" if value <= limit else "MISSED"
        rows.append([name, f"{limit:g}", f"{value:.4f}", where, str(count), verdict])
    return rows


def routes(found: dict[tuple[str, str, str], Result]) -> str:
    """What served each op of each engine."""
    parts = []
    for (shape, mode, who), result in found.items():
        rows = [
            [row["op"], row["impl_id"], row["mode"], str(row["bound"]), str(row["calls"]),
             str(row["reason"])[:110]]
            for reply in result.get("routes", [])
            for row in reply.get("ops", [])
        ]  # fmt: skip
        if rows:
            columns = ["op", "implementation", "mode", "bound", "calls", "why"]
            parts.append(f"#### {shape}, {mode}, {WHO[who]}\n\n{table(columns, rows)}")
    text = "Calls are those of 16 prompts and 64 tokens; replays of a graph are not counted."
    return "\n\n".join([f"### Routes\n\n{text}", *parts]) if parts else ""


def host_table(results: Path) -> str:
    """Host time of layers' calls, the median of the rounds."""
    found = {who: load(results / f"host-{who}.json") for who in WHO}
    times = {who: result["host_us"] for who, result in found.items() if result}
    if "stock" not in times:
        return ""
    rows = []
    for name, rounds in times["stock"].items():
        stock = statistics.median(rounds)
        row = [name, f"{stock:.1f}"]
        for who in times:
            if who != "stock":
                mine = statistics.median(times[who][name])
                row.append(f"{mine:.1f} ({mine / stock:.2f})")
        rows.append(row)
    columns = ["layer", *(WHO[who] for who in times)]
    return (
        "### Host microseconds of a layer's call, eager, asynchronous launches\n\nMedians of 5 "
        f"rounds in which the processes take turns; of stock in brackets.\n\n{table(columns, rows)}"
    )


def conformance_table(results: Path, full: bool = False) -> str:
    """A row for each implementation and dtype, and failures; all of them, and what was refused,
    where it is to be full."""
    rows, failures, reasons = [], [], Counter[tuple[str, str]]()
    for path in sorted([*results.glob("cases-*.json"), *results.glob("cases-*.lines")]):
        if path.suffix == ".lines" and path.with_suffix(".json").is_file():
            continue
        impl = path.name.removeprefix("cases-").rpartition(".")[0]
        data = load(path) if path.suffix == ".json" else None
        lines = data["results"] if data else _lines(path)
        counts: dict[str, Counter[str]] = {}
        for row in lines:
            counts.setdefault(row["dtype"], Counter())[row["status"]] += 1
            if row["reason"]:
                reasons[impl, f"{row['op']}: {row['reason'][:120]}"] += 1
            failures += [
                f"{impl}: {row['op']} {row['dtype']} '{row['case']}': {kind}: "
                + what.replace("\n", " ")[:160]
                for kind, what in row["problems"]
            ]
        state = "" if data else " (ended early)"
        left = [f"{e['op']}: {e['reason']}" for e in (data or {}).get("left_out", [])]
        if data and not lines:
            why = f"not available: {left[0]}" if left else "no case ran"
            rows.append([impl, *"----", data.get("error") or why])
        more = f", not available {len(left)}" if left else ""
        reasons.update((impl, f"not available: {text[:140]}") for text in left)
        ops = {row["op"] for row in lines}
        for dtype, count in sorted(counts.items()):
            numbers = (str(count[s]) for s in ("passed", "skipped", "failed"))
            rows.append([impl + state, dtype, *numbers, f"{len(ops)} ops{more}"])
    if not rows:
        return ""
    columns = ["implementation", "dtype", "passed", "refused", "failed", ""]
    parts = ["### Conformance", table(columns, rows)]
    listed = failures if full else failures[:FAILURES]
    if listed:
        parts.append("\n".join(f"- {line}" for line in listed))
    if len(failures) > len(listed):
        parts.append(f"- and {len(failures) - len(listed)} more failures")
    refused = [[i, what, str(n)] for (i, what), n in sorted(reasons.items())]
    if refused and full:
        parts.append(
            "<details><summary>Refused, and why</summary>\n\n"
            + table(["implementation", "op and reason", "cases"], refused)
            + "\n\n</details>"
        )
    return "\n\n".join(parts)


def _lines(path: Path) -> list[Result]:
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # it was being written when its writer ended
    return rows


def batches_table(results: Path) -> str:
    """Batch invariance, a row for each implementation and op."""
    rows = []
    for path in sorted(results.glob("batches-*.json")):
        data = load(path)
        by_op: dict[str, list[Result]] = {}
        for row in data["rows"] if data else ():
            by_op.setdefault(row["op"], []).append(row)
        for op, found in by_op.items():
            ran = [r for r in found if "batches" in r]
            bad = [f"{r['dtype']} {r['size']}: {r['differ']}" for r in ran if r["differ"]]
            bad += [f"{r['dtype']} {r['size']}: {r['why']}" for r in found if "why" in r]
            total = sum(r["batches"] for r in ran)
            rows.append([data["impl"], op, str(len(ran)), str(total), "; ".join(bad) or "none"])
    columns = ["implementation", "op", "dtypes and sizes", "batches", "that differ"]
    return f"### Batches of 1 to 512, bit for bit\n\n{table(columns, rows)}" if rows else ""


def doctor_lines(results: Path) -> str:
    """The verdict of each doctor."""
    lines = []
    for path in sorted(results.glob("doctor-*.txt")):
        said = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        verdict = next(
            (line for line in reversed(said) if line.startswith("Verdict")), "no verdict"
        )
        lines.append(f"- {path.stem.removeprefix('doctor-')}: {verdict}")
    return "\n".join(["### vllm-fl doctor", "", *lines]) if lines else ""


def memcheck_lines(results: Path) -> str:
    """What compute-sanitizer said."""
    data = load(results / "memcheck.json")
    if data is None:
        return ""
    said = (data["said"] or data["tail"] or ["nothing"])[-1]
    right = sum(call.endswith(": right") for call in data["calls"])
    return (
        f"### memcheck\n\n{data['tool']}: exit code {data['rc']}, {right} calls right, "
        f"{len(data['calls']) - right} not made; it said: `{said.strip()}`"
    )


def text_of(results: Path, full: bool = False) -> str:
    """Every table for which there are results.

    Args:
        full: with all rows of the kernels, FlagGems' tables and the routes.
    """
    found = engines(results)
    abouts = [r["about"] for r in found.values() if "about" in r]
    parts = [headline(abouts[0])] if abouts else []
    kernels = load(results / "kernels.json")
    if kernels is not None:
        parts.append(
            f"## Kernels\n\n{(kernel_tables.markdown if full else kernel_tables.summary)(kernels)}"
        )
    parts += [conformance_table(results, full), batches_table(results), memcheck_lines(results)]
    parts.append(host_table(results))
    flaggems = results / "flaggems.md"
    if full and flaggems.is_file():
        parts.append(f"## FlagGems\n\n{flaggems.read_text()}")
    if full and found:
        parts.append(routes(found))
    parts.append(doctor_lines(results))
    if found:
        columns = ["goal", "limit", "worst", "where", "values", "verdict"]
        parts += [model_table(found), to_float32(results, found)]
        parts += [f"### Goals\n\n{table(columns, model_goals(found))}"]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
