# SPDX-License-Identifier: Apache-2.0
"""One vLLM configuration on one GPU: GPU time per decode step, log-probabilities, routes.

    python benchmarks/gpu/model.py run MODEL OUT.json [--mode eager|decode-graph|graph]
                                   [--attention TRITON_ATTN] [--stock] [--repeat 3]
    python benchmarks/gpu/model.py compare A.json B.json

MODEL is q06 or q4: the shapes of Qwen3-0.6B and -4B, or moe: a small Qwen3-MoE of 8 layers with 32
experts, 8 of them for each token. Weights come from a seeded N(0, 1/fan_in): vLLM's own dummy
weights make the network alternate two tokens, which hides wrong kernels.
`decode-graph` is CUDA graphs for decode without Inductor, `graph` is vLLM's default. --stock runs
without the plugin. Configurations are ranked by GPU microseconds per decode step
(torch.profiler, kernels only), which repeat within 1 %; tokens per second of a small model are
bound by the host and vary by 20 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import zlib
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "q06": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "q4": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "decode-graph": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "graph": {},
}
MOE_OPTIONS: dict[str, Any] = {"moe_backend": "triton"}
"""vLLM's other experts keep their weights in another order, so that the same seed would give them
another model."""
BATCHES = (1, 32)
STEPS = (17, 33)


def write_config(model: str) -> str:
    """A folder with the model's config.json and no weights."""
    folder = Path.home() / ".cache" / "vllm_fl" / "shapes" / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[model]}))
    return str(folder)


def seed_weights(module: Any) -> None:
    """The same weights in every process and under every configuration."""
    import torch

    with torch.inference_mode():
        for name, parameter in module.named_parameters():
            seed = zlib.crc32(name.encode())
            generator = torch.Generator(device=parameter.device).manual_seed(seed)
            noise = torch.randn(parameter.shape, device=parameter.device, generator=generator)
            if parameter.dim() == 1:
                parameter.data.copy_(1 + 0.1 * noise)
            else:
                embeds = "embed" in name or "lm_head" in name
                scale = 0.08 if embeds else parameter.shape[-1] ** -0.5
                parameter.data.copy_(noise * scale)


def model_of(llm: Any) -> Any:
    """The module inside an in-process engine."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    module = worker.model_runner.model
    return module if hasattr(type(module), "named_parameters") else module.unwrap()


def run(arguments: argparse.Namespace) -> None:
    """Measure one configuration and write it down."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if arguments.stock:
        os.environ["VLLM_PLUGINS"] = ""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams

    options = dict(MODES[arguments.mode])
    if "num_experts" in SHAPES[arguments.model]:
        options.update(MOE_OPTIONS)
    if arguments.attention:
        options["attention_backend"] = arguments.attention
    start = time.perf_counter()
    llm = LLM(
        write_config(arguments.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=64,
        gpu_memory_utilization=0.4,
        kv_cache_memory_bytes=4 << 30,
        disable_log_stats=True,
        **options,
    )
    result: dict[str, Any] = {
        "model": arguments.model,
        "mode": arguments.mode,
        "stock": arguments.stock,
        "settings": {k: v for k, v in os.environ.items() if k.startswith("VLLM_FL_")},
        "load_s": round(time.perf_counter() - start, 1),
    }
    seed_weights(model_of(llm))
    llm.reset_prefix_cache()

    def greedy(count: int, **more: Any) -> Any:
        return SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, **more
        )

    def prompts(batch: int) -> list[dict[str, list[int]]]:
        return [
            {"prompt_token_ids": [(7 * i + 13 * j) % 150000 for j in range(64)]}
            for i in range(batch)
        ]

    for batch in BATCHES:
        llm.generate(prompts(batch), greedy(64), use_tqdm=False)
        speeds = []
        for _ in range(1 if arguments.mode == "eager" else 3):
            start = time.perf_counter()
            llm.generate(prompts(batch), greedy(64), use_tqdm=False)
            speeds.append(64 * batch / (time.perf_counter() - start))
        # Two lengths: their difference is 16 decode steps and nothing else.
        steps, kernels = [], []
        for _ in range(arguments.repeat):
            totals, counts = [], []
            for tokens in STEPS:
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    llm.generate(prompts(batch), greedy(tokens), use_tqdm=False)
                    torch.cuda.synchronize()
                events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
                totals.append(sum(e.self_device_time_total for e in events))
                counts.append(sum(e.count for e in events))
            steps.append((totals[1] - totals[0]) / (STEPS[1] - STEPS[0]))
            kernels.append((counts[1] - counts[0]) / (STEPS[1] - STEPS[0]))
        result[f"batch_{batch}"] = {
            "us_per_step": round(statistics.median(steps), 1),
            "all_us_per_step": [round(s, 1) for s in steps],
            "kernels_per_step": round(statistics.median(kernels), 1),
            "tok_per_s": round(statistics.median(speeds)),
        }

    chooser = random.Random(1)
    queries = [
        {"prompt_token_ids": [chooser.randrange(150000) for _ in range(40 + 37 * i)]}
        for i in range(8)
    ]
    outputs = llm.generate(queries, greedy(64, prompt_logprobs=0), use_tqdm=False)
    result["tokens"] = [list(o.outputs[0].token_ids) for o in outputs]
    result["prompt_logprobs"] = [
        [
            round(step[token].logprob, 5)
            for token, step in list(zip(o.prompt_token_ids, o.prompt_logprobs, strict=True))[1:]
        ]
        for o in outputs
    ]
    if not arguments.stock:
        result["routes"] = llm.collective_rpc("vllm_fl_dispatch")
    Path(arguments.out).write_text(json.dumps(result, default=str))
    shown = {k: v for k, v in result.items() if k not in ("tokens", "prompt_logprobs", "routes")}
    print("RESULT", json.dumps(shown), flush=True)
    for reply in result.get("routes", []):
        for row in reply["ops"]:
            print("ROUTE", row["op"], row["impl_id"], row["bound"], row["calls"], flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """The distance and the ratio of two results."""
    a, b = (json.loads(Path(p).read_text()) for p in (arguments.a, arguments.b))
    pairs = zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)
    gaps = [abs(x - y) for p, q in pairs for x, y in zip(p, q, strict=True)]
    same = sum(p == q for p, q in zip(a["tokens"], b["tokens"], strict=True))
    text = f"logprobs: mean {statistics.mean(gaps):.4f}, largest {max(gaps):.3f}; same {same}/8"
    for batch in BATCHES:
        x, y = (r[f"batch_{batch}"]["us_per_step"] for r in (a, b))
        text += f"; batch {batch}: {x} / {y} = {x / y:.4f}"
    print(f"COMPARE {Path(arguments.a).stem} to {Path(arguments.b).stem}: {text}")


def main() -> None:
    """Run or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("model", choices=SHAPES)
    one.add_argument("out")
    one.add_argument("--mode", choices=MODES, default="graph")
    one.add_argument("--attention")
    one.add_argument("--stock", action="store_true")
    one.add_argument("--repeat", type=int, default=3)
    one.set_defaults(call=run)
    two = commands.add_parser("compare")
    two.add_argument("a")
    two.add_argument("b")
    two.set_defaults(call=compare)
    chosen = parser.parse_args()
    chosen.call(chosen)


if __name__ == "__main__":
    main()
