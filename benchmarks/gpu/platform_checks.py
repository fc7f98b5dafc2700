# SPDX-License-Identifier: Apache-2.0
"""What vllm_fl's platform does not refuse, and warm-up: does it run, and does it say the same?

    python benchmarks/gpu/platform_checks.py OUT [--only NAME ...] [--jobs 3] [--timeout 240]
    python benchmarks/gpu/platform_checks.py OUT --dry-run      # what a CPU can show of it

Each check is an engine in a process of its own, with a small Qwen3 of seeded weights; several share
the GPU, because nothing is timed. Meant for a vLLM without its extension, where PlatformFL steps
in; beside a stock vLLM it checks vLLM itself. Answers are compared with those of `base`: the same
greedy tokens where the arithmetic is the same, else the distance of the log-probabilities, beside
which stands that of the default graph mode, the noise between two right answers.

The `warm-*` checks generate with FlagGems before everything and list each Triton kernel that was
compiled after the engine was ready, by vLLM (in its tree) and by others; others must be none.
`cold` switches the warm-up off and must list some, or the check shows nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from about import about, table, write_json
from model import COMMON, greedy, model_of, seed_weights, settle_environment
from report import distance

CONFIG = {
    **COMMON,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODE_GRAPH = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
EAGER = {"enforce_eager": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
FLAGOS = {"VLLM_FL_PREFER": "flagos"}
COLD = {**FLAGOS, "VLLM_FL_PLUGIN_MODULES": "cold_plugin"}

CHECKS: dict[str, dict[str, Any]] = {
    "base": {"llm": EAGER},
    "graph": {"llm": {}, "close": True},
    "decode-graph": {"llm": DECODE_GRAPH, "mostly": True},
    "first-runner": {"llm": EAGER, "same": True, "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "fp8-cache": {"llm": {**EAGER, "kv_cache_dtype": "fp8"}, "close": True},
    "offload": {"llm": {**EAGER, "cpu_offload_gb": 0.02}, "same": True},
    "ngram": {"llm": {**EAGER, "speculative_config": NGRAM}, "mostly": True},
    "lora-zero": {"llm": {**EAGER, **LORA}, "adapter": 0.0, "same": True},
    "lora": {"llm": {**EAGER, **LORA}, "adapter": 1.0, "mostly": True, "to": "merged"},
    "merged": {"llm": EAGER, "merge": True},
    "warm-eager": {"llm": EAGER, "env": FLAGOS, "compiles": 0},
    "warm-decode-graph": {"llm": DECODE_GRAPH, "env": FLAGOS, "compiles": 0},
    "cold": {"llm": EAGER, "env": COLD, "compiles": None},
}
"""Name to: arguments of the engine; `env`; what the answers must be to those of `to` (base): the
`same` tokens, `close` log-probabilities, or `mostly` the same tokens before they part; `adapter`:
the scale of a LoRA adapter that answers; `merge`: it is added to the weights; `compiles`: how many
kernels of others may be compiled once the engine is ready, None for some."""

ON_A_CPU = ("base", "lora-zero", "lora")
RANK = 8
TARGETS = ("self_attn.o_proj", "mlp.down_proj")
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 100, 129, 255)
COLD_PLUGIN = """
from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend
FlagGemsBackend.compiles_at_first_call = False
def register(registry): pass
"""


# ------------------------------------------------------------------------------- one check


def adapter_tensors(scale: float) -> dict[str, Any]:
    """A LoRA adapter's tensors by PEFT's names, seeded."""
    import torch

    generator = torch.Generator().manual_seed(5)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for target in TARGETS:
            width = hidden if target.startswith("self") else inner
            name = f"base_model.model.model.layers.{layer}.{target}"
            a = torch.randn(RANK, width, generator=generator) * width**-0.5
            b = torch.randn(hidden, RANK, generator=generator) * 0.3 * scale
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    return tensors


def write_adapter(folder: Path, scale: float) -> str:
    """The adapter as files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [target.rpartition(".")[2] for target in TARGETS],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter_tensors(scale), folder / "adapter_model.safetensors")
    return str(folder)


class Unwrapped:
    """A module's parameters by their names without LoRA's wrappers: a weight's seed is its name."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Any:
        """As those of a module."""
        for name, parameter in self.module.named_parameters():
            yield name.replace(".base_layer.", "."), parameter


def merge_adapter(module: Any) -> None:
    """Add the adapter to the weights."""
    import torch

    tensors = adapter_tensors(1.0)
    parameters = dict(module.named_parameters())
    with torch.inference_mode():
        for layer in range(CONFIG["num_hidden_layers"]):
            for target in TARGETS:
                name = f"model.layers.{layer}.{target}"
                a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
                weight = parameters[f"{name}.weight"]
                weight.data.add_((b @ a).to(weight))


class Compiled:
    """Triton kernels that are compiled from now on: (module, name)."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, str]] = []
        try:
            from triton import knobs
        except ImportError:
            return
        before = knobs.runtime.jit_post_compile_hook

        def hook(**told: Any) -> Any:
            fn = told.get("fn")
            self.kernels.append((str(getattr(fn, "module", "")), str(getattr(fn, "name", ""))))
            return None if before is None else before(**told)

        knobs.runtime.jit_post_compile_hook = hook

    def told(self) -> dict[str, list[str]]:
        """By whose kernels they are."""
        names = sorted(set(self.kernels))
        return {
            "vllm": [f"{m}.{n}" for m, n in names if m.startswith("vllm.")],
            "others": [f"{m}.{n}" for m, n in names if not m.startswith("vllm.")],
        }


def run(name: str, folder: Path, dry: bool) -> dict[str, Any]:
    """Build the engine, answer, and return what there is to compare."""
    settle_environment(stock=False)
    check = CHECKS[name]
    from vllm import LLM
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    config = folder / "model"
    config.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if dry else "bfloat16"
    (config / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": dtype}))
    options = {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 1 << 29}
    llm = LLM(
        str(config),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=16,
        disable_log_stats=True,
        **(options if not dry else {"gpu_memory_utilization": 0.2}),
        **check["llm"],
    )
    module = model_of(llm)
    seed_weights(Unwrapped(module))
    if "merge" in check:
        merge_adapter(module)
    llm.reset_prefix_cache()
    compiled = Compiled()
    lora = None
    if "adapter" in check:
        lora = LoRARequest("adapter", 1, write_adapter(folder / name, check["adapter"]))
    queries = [
        {"prompt_token_ids": [3 + (37 * i + 11 * j * j) % 8000 for j in range(length)]}
        for i, length in enumerate(LENGTHS)
    ]
    # vLLM's first model runner has no log-probabilities of prompts under LoRA.
    logprobs = {} if lora is not None else {"prompt_logprobs": 0}
    outputs = llm.generate(queries, greedy(24, **logprobs), use_tqdm=False, lora_request=lora)
    for query in queries[:3]:  # each alone, and then the same lengths by other neighbours
        llm.generate([query], greedy(5), use_tqdm=False, lora_request=lora)
    tables = llm.collective_rpc("vllm_fl_dispatch")
    return {
        "about": about("cpu" if dry else "cuda"),
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__name__}",
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "prompt_logprobs": [
            [
                step[token].logprob
                for token, step in list(zip(o.prompt_token_ids, o.prompt_logprobs, strict=True))[1:]
            ]
            for o in outputs
            if o.prompt_logprobs is not None
        ],
        "routes": sorted({f"{r['op']} -> {r['impl_id']}" for r in tables[0]["ops"] if r["bound"]}),
        "compiled": compiled.told(),
    }


# ------------------------------------------------------------------------------- all of them


def start(name: str, folder: Path, dry: bool, timeout: float) -> dict[str, Any]:
    """One check in a process; {"error"} where it ended otherwise than with a result."""
    log, out = folder / f"{name}.log", folder / f"{name}.json"
    out.unlink(missing_ok=True)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= CHECKS[name].get("env", {})
    command = [
        sys.executable,
        __file__,
        str(folder),
        "--child",
        name,
        *(["--dry-run"] if dry else []),
    ]
    begin = time.perf_counter()
    with log.open("w") as stream:
        try:
            subprocess.run(command, env=environment, stdout=stream, stderr=stream, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"still running after {timeout:.0f} s"}
    if not out.is_file():
        errors = [line for line in log.read_text().splitlines() if "Error" in line]
        return {"error": (errors or ["no result"])[-1].strip()[-300:]}
    return {**json.loads(out.read_text()), "seconds": time.perf_counter() - begin}


def verdict(name: str, found: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """("ok", "FAILED" or "-", and what was seen)."""
    check, result = CHECKS[name], found[name]
    if "error" in result:
        return "FAILED", result["error"]
    if "compiles" in check:
        others = result["compiled"]["others"]
        wanted = bool(others) if check["compiles"] is None else len(others) == check["compiles"]
        seen = f"{len(others)} of others compiled while requests waited: {', '.join(others) or '-'}"
        return ("ok" if wanted else "FAILED"), seen
    base = found.get(check.get("to", "base"), {"error": ""})
    if "error" in base or name == "base":
        return "-", "nothing to compare with" if name != "base" else result["platform"]
    pairs = list(zip(result["tokens"], base["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    seen = f"{same} of {len(pairs)} sequences"
    if check.get("same"):
        return ("ok" if same == len(pairs) else "FAILED"), seen
    if check.get("mostly"):
        # Where rounding decides one token, all that follow are others: what counts is how far
        # sequences agree. Other weights agree nowhere.
        agreed, of = sum(leading(a, b) for a, b in pairs), sum(len(a) for a, _ in pairs)
        seen = f"{seen}, {agreed} of {of} tokens before they part"
        return ("ok" if 2 * agreed >= of else "FAILED"), seen
    gap = distance(result, base)
    seen = f"{seen}, d logprob {gap['mean']:.4f}"
    if check.get("close"):
        noise = found.get("graph", {})
        limit = (
            None
            if name == "graph" or "error" in noise or not noise
            else distance(noise, found["base"])
        )
        if limit is None:
            return "-", seen
        # FP8 keeps 3 bits of mantissa where bfloat16 keeps 7: 16 times the rounding.
        times = 16 if name == "fp8-cache" else 2
        bound = times * max(limit["mean"], 1e-3)
        return ("ok" if gap["mean"] <= bound else "FAILED"), f"{seen} (limit {bound:.4f})"
    return "-", result["platform"]


def leading(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences have in common, from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> int:
    """Run, print a table, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=CHECKS)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        result = run(arguments.child, folder, arguments.dry_run)
        write_json(folder / f"{arguments.child}.json", result)
        return 0
    (folder / "cold_plugin.py").write_text(COLD_PLUGIN)
    names = arguments.only or (ON_A_CPU if arguments.dry_run else CHECKS)
    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        started = {
            name: pool.submit(start, name, folder, arguments.dry_run, arguments.timeout)
            for name in names
        }
        found = {name: future.result() for name, future in started.items()}
    rows = [[name, *verdict(name, found)] for name in names]
    print(table(["check", "verdict", "what was seen"], rows))
    for name in names:
        routes = found[name].get("routes")
        if routes and name in ("base", "graph", "warm-eager"):
            print(f"\n{name}: {', '.join(routes)}")
    return 1 if any(row[1] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
