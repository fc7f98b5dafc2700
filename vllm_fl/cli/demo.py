# SPDX-License-Identifier: Apache-2.0
"""`vllm-fl demo`: a real model on real vLLM, and what served each of its operators."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..dispatch.default import get_default_manager
from ..dispatch.errors import DispatchError
from . import demo_model
from .arguments import positive
from .output import answer_stream, print_table

__all__ = ["DemoResult", "add_parser", "run_demo"]

PROMPT = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo saw.

    Attributes:
        prompt: the question.
        answer: the model's text.
        mode: "eager" or "compiled".
        rows: the route table collected from the workers.
        enabled: False if VLLM_FL_ENABLED=0, when no table exists.
    """

    prompt: str
    answer: str
    mode: str
    rows: list[dict[str, Any]]
    enabled: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        keys = ("op", "impl_id", "kind", "bound", "calls", "reason", "rejected")
        return {
            "answer": self.answer,
            "mode": self.mode,
            "ops": [{key: row[key] for key in keys} for row in self.rows],
        }


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="run a small real model on vLLM and show what served each operator",
        description="Runs a small real model on vLLM with the plugin, prints its answer and the "
        "route table of the workers: operator, implementation, bound layers, calls.",
    )
    parser.add_argument("--prompt", default=PROMPT, help="your own question")
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM's default mode instead of eager"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="length of the answer (64)"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its result."""
    with answer_stream() as stream:
        result = run_demo(
            arguments.prompt,
            compiled=arguments.compiled,
            max_tokens=arguments.max_tokens,
            verbose=arguments.verbose,
        )
        if arguments.json:
            print(json.dumps(result.to_dict(), ensure_ascii=False), file=stream)
        else:
            _print(result, stream)
    return 0


def run_demo(prompt: str, *, compiled: bool, max_tokens: int, verbose: bool) -> DemoResult:
    """Prepare the model, run it, and collect the workers' route tables.

    Raises:
        DemoModelError: the model cannot be prepared.
        ConfigError: the configuration is wrong.
    """
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_FL_LOG_LEVEL", "WARNING")
    enabled = _checked_settings()
    _progress("preparing the model")
    folder = demo_model.prepare()
    _progress(f"starting vLLM ({'compiled' if compiled else 'eager'}); this takes half a minute")
    llm = _engine(folder, compiled=compiled)
    try:
        if enabled:
            _rpc(llm, "count")
        answer = _ask(llm, prompt, max_tokens)
        rows = _merged(_rpc(llm, "uncount")) if enabled else []
    finally:
        llm.llm_engine.engine_core.shutdown()
    return DemoResult(prompt, answer, "compiled" if compiled else "eager", rows, enabled)


def _checked_settings() -> bool:
    """Whether vllm_fl is on. A wrong setting ends the demo here, before the model is prepared."""
    from ..vllm_plugin.plugin import check_layer_names

    manager = get_default_manager()
    if manager.config.enabled:
        check_layer_names(manager.config)
        manager.ensure_initialized()
    return manager.config.enabled


def _progress(line: str) -> None:
    print(f"vllm-fl demo: {line}", file=sys.stderr, flush=True)


def _engine(folder: Path, *, compiled: bool) -> Any:
    # vLLM on CPU takes its cache size from here; the demo needs little.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    return LLM(
        model=str(folder),
        enforce_eager=not compiled,
        max_model_len=1024,
        # On CPU this is a share of RAM, and vLLM's check of free memory reads too little of it.
        gpu_memory_utilization=0.3,
        disable_log_stats=True,
    )


def _ask(llm: Any, prompt: str, max_tokens: int) -> str:
    from vllm import SamplingParams

    outputs = llm.chat(
        [{"role": "user", "content": prompt}],
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
        use_tqdm=False,
    )
    return str(outputs[0].outputs[0].text).strip()


def _rpc(llm: Any, request: str) -> list[dict[str, Any]]:
    from ..vllm_plugin.routes import RPC_NAME

    # Without a timeout: a late reply would be taken for the answer to the next request.
    replies: list[dict[str, Any]] = llm.collective_rpc(RPC_NAME, args=(request,))
    return replies


def _merged(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from ..vllm_plugin.routes import merge_rows

    for reply in replies:
        if "error" in reply:
            raise DispatchError(f"a worker could not answer: {reply['error']}")
    return merge_rows([reply["ops"] for reply in replies])


def _print(result: DemoResult, stream: TextIO) -> None:
    print(f"\nuser:      {result.prompt}\nassistant: {result.answer}\n", file=stream)
    if not result.enabled:
        print("vllm_fl is switched off (VLLM_FL_ENABLED=0): stock vLLM answered.", file=stream)
        return
    print(f"What ran in the workers ({result.mode}):", file=stream)
    print_table(
        stream,
        ("operator", "implementation", "kind", "layers", "calls", "why"),
        [
            (row["op"], row["impl_id"], row["kind"], row["bound"], row["calls"], row["reason"])
            for row in result.rows
        ],
    )
    rejected = [
        (row["op"], entry["impl_id"], entry["reason"])
        for row in result.rows
        for entry in row["rejected"]
    ]
    if rejected:
        print("What was rejected, and why:", file=stream)
        print_table(stream, ("operator", "implementation", "reason"), rejected)
    else:
        print("Nothing was rejected.", file=stream)
