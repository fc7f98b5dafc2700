# SPDX-License-Identifier: Apache-2.0
"""One vLLM configuration on one GPU: GPU time per decode step, log-probabilities, routes.

    python benchmarks/gpu/model.py run MODEL OUT.json [--mode eager|decode-graph|graph]
                                   [--attention TRITON_ATTN] [--stock] [--repeat 3]
                                   [--lock FILE] [--memory 0.4]
    python benchmarks/gpu/model.py host MODEL OUT.json TURNS INDEX COUNT [--stock]
    python benchmarks/gpu/model.py compare A.json B.json

MODEL is q06 or q4: the shapes of Qwen3-0.6B and -4B, or moe: a small Qwen3-MoE of 8 layers with 32
experts, 8 of them for each token. Weights come from a seeded N(0, 1/fan_in): vLLM's own dummy
weights make the network alternate two tokens, which hides wrong kernels.
`decode-graph` is CUDA graphs for decode without Inductor, `graph` is vLLM's default. --stock runs
without the plugin. Configurations are ranked by GPU microseconds per decode step
(torch.profiler, kernels only), which repeat within 1 %; tokens per second of a small model are
bound by the host and vary by 20 %.

With --lock, several of these share a GPU: they load and generate together and are measured one at
a time. `host` measures what a call of the model's layers costs the CPU in eager mode, in COUNT
processes that take turns in the folder TURNS.
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

from about import about, write_json
from report import distance
from turns import Lock, Turns

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
STEPS = (5, 21)
"""Two lengths: what is between them is 16 decode steps."""
TIMED = 64
"""Tokens of a prompt of which the speed is told."""


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
                values = 1 + 0.1 * noise
            else:
                embeds = "embed" in name or "lm_head" in name
                values = noise * (0.08 if embeds else parameter.shape[-1] ** -0.5)
            # A float32 model has the weights that the others have.
            parameter.data.copy_(values.to(torch.bfloat16))


def model_of(llm: Any) -> Any:
    """The module inside an in-process engine."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    module = worker.model_runner.model
    return module if hasattr(type(module), "named_parameters") else module.unwrap()


def engine(arguments: argparse.Namespace, mode: str) -> Any:
    """An in-process engine with seeded weights."""
    from vllm import LLM

    options = dict(MODES[mode])
    if "num_experts" in SHAPES[arguments.model]:
        options.update(MOE_OPTIONS)
    if arguments.attention:
        options["attention_backend"] = arguments.attention
    llm = LLM(
        write_config(arguments.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=64,
        gpu_memory_utilization=arguments.memory,
        kv_cache_memory_bytes=2 << 30,
        disable_log_stats=True,
        dtype=arguments.dtype,
        **options,
    )
    seed_weights(model_of(llm))
    llm.reset_prefix_cache()
    return llm


def settle_environment(stock: bool) -> None:
    """What has to be set before vLLM is imported."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if stock:
        os.environ["VLLM_PLUGINS"] = ""


def about_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked for."""
    named = ("VLLM_FL_", "VLLM_USE_V2", "VLLM_PLUGINS")
    return {
        "about": about("cuda"),
        "model": arguments.model,
        "stock": arguments.stock,
        "settings": {k: v for k, v in os.environ.items() if k.startswith(named)},
    }


def greedy(count: int, **more: Any) -> Any:
    """Sampling of so many tokens, whatever they are."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, **more
    )


def generate(llm: Any, batch: int, tokens: int) -> None:
    """So many tokens for a batch of prompts of 64."""
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j) % 150000 for j in range(64)]} for i in range(batch)
    ]
    llm.generate(prompts, greedy(tokens), use_tqdm=False)


def answers(llm: Any) -> dict[str, Any]:
    """Greedy tokens, and the log-probabilities of the prompts' tokens."""
    chooser = random.Random(1)
    queries = [
        {"prompt_token_ids": [chooser.randrange(150000) for _ in range(40 + 18 * i)]}
        for i in range(16)
    ]
    outputs = llm.generate(queries, greedy(64, prompt_logprobs=0), use_tqdm=False)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "prompt_logprobs": [
            [
                round(step[token].logprob, 5)
                for token, step in list(zip(o.prompt_token_ids, o.prompt_logprobs, strict=True))[1:]
            ]
            for o in outputs
        ],
    }


def gpu_work(profiler: Any) -> tuple[float, int]:
    """GPU microseconds and kernels of what a profiler saw. The events as they come: to aggregate
    them by name takes longer than what is measured."""
    from torch.autograd import DeviceType

    events = [
        event.duration_ns()
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sum(events) / 1000, len(events)


def measured(llm: Any, batch: int, repeat: int) -> dict[str, Any]:
    """GPU time and kernels of a decode step, and tokens per second."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    generate(llm, batch, 8)
    start = time.perf_counter()
    generate(llm, batch, TIMED)
    speed = TIMED * batch / (time.perf_counter() - start)
    # Two lengths: their difference is 16 decode steps and nothing else.
    steps, kernels = [], []
    for _ in range(repeat):
        totals, counts = [], []
        for tokens in STEPS:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                generate(llm, batch, tokens)
                torch.cuda.synchronize()
            us, count = gpu_work(profiler)
            totals.append(us)
            counts.append(count)
        steps.append((totals[1] - totals[0]) / (STEPS[1] - STEPS[0]))
        kernels.append((counts[1] - counts[0]) / (STEPS[1] - STEPS[0]))
    return {
        "us_per_step": round(statistics.median(steps), 1),
        "all_us_per_step": [round(s, 1) for s in steps],
        "kernels_per_step": round(statistics.median(kernels), 1),
        "tok_per_s": round(speed),
    }


def run(arguments: argparse.Namespace) -> None:
    """Measure one configuration and write it down."""
    settle_environment(arguments.stock)
    lock = Lock(arguments.lock)
    import torch
    import vllm  # noqa: F401  # before the lock: it takes ten seconds and leaves the GPU alone

    with lock.shared() as waited:
        start = time.perf_counter()
        llm = engine(arguments, arguments.mode)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        result = {
            **about_run(arguments),
            "mode": arguments.mode,
            "runner": type(runner.model_runner).__module__,
            "load_s": round(time.perf_counter() - start, 1),
        }
        if not arguments.stock:
            llm.collective_rpc("vllm_fl_dispatch", args=("count",))
        result |= answers(llm)
        if not arguments.stock:
            result["routes"] = llm.collective_rpc("vllm_fl_dispatch")
            llm.collective_rpc("vllm_fl_dispatch", args=("uncount",))
        for batch in BATCHES:
            generate(llm, batch, 2)
        torch.cuda.synchronize()
    result["waited_s"] = round(waited, 1)
    with lock.alone():
        start = time.perf_counter()
        for batch in BATCHES if arguments.repeat else ():
            result[f"batch_{batch}"] = measured(llm, batch, arguments.repeat)
        result["measured_s"] = round(time.perf_counter() - start, 1)
    write_json(Path(arguments.out), result)
    long = ("about", "tokens", "prompt_logprobs", "routes")
    shown = {k: v for k, v in result.items() if k not in long}
    print("RESULT", json.dumps(shown), flush=True)
    for reply in result.get("routes", []):
        for row in reply["ops"]:
            print("ROUTE", row["op"], row["impl_id"], row["bound"], row["calls"], flush=True)


# --------------------------------------------------------------------------- host time of layers


def layer_calls(module: Any, batch: int, device: str) -> dict[str, Any]:
    """Calls of the layers of a decoder that vLLM builds of its CustomOps, as its attention and
    its MLP make them: name to a function without arguments. Weights and sizes are the model's."""
    import torch

    named = dict(module.named_modules())

    def first(suffix: str) -> tuple[str, Any]:
        return next((n, m) for n, m in named.items() if n.endswith(suffix))

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    _, attention = first(".self_attn")
    hidden = first(".input_layernorm")[1].weight.shape[0]
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    widths = [heads * size, kv_heads * size, kv_heads * size]
    query, key, _ = rows(batch, sum(widths)).split(widths, dim=-1)
    by_head = query.unflatten(-1, (heads, size))
    q, k = query.contiguous(), key.contiguous()
    positions = torch.arange(batch, device=device)
    x, residual = rows(batch, hidden), rows(batch, hidden)
    norm, rope = first(".input_layernorm")[1], attention.rotary_emb
    calls = {
        "RMSNorm": lambda: norm(x),
        "RMSNorm, residual": lambda: norm(x, residual),
        "RMSNorm of query heads": lambda: attention.q_norm(by_head),
        "RotaryEmbedding": lambda: rope(positions, q, k),
    }
    activation = next((m for n, m in named.items() if n.endswith(".mlp.act_fn")), None)
    if activation is not None:
        width = first(".mlp.gate_up_proj")[1].weight.shape[0]
        gated = rows(batch, width)
        calls["SiluAndMul"] = lambda: activation(gated)
    return calls


def host(arguments: argparse.Namespace) -> None:
    """Measure what calls of layers cost the CPU, taking turns with the other processes."""
    settle_environment(arguments.stock)
    import torch
    from clock import host_us

    llm = engine(arguments, "eager")
    generate(llm, 32, 2)
    turns = Turns(Path(arguments.turns), arguments.index, arguments.count)
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        calls = {
            f"{name}, batch {batch}": call
            for batch in BATCHES
            for name, call in layer_calls(model_of(llm), batch, "cuda").items()
        }
        for call in calls.values():
            host_us(call, "cuda", calls=50, means=1)
        turns.ready()
        for round_ in range(arguments.rounds):
            with turns.turn(round_):
                for name, call in calls.items():
                    found.setdefault(name, []).append(round(host_us(call, "cuda"), 2))
    result = {**about_run(arguments), "mode": "eager", "host_us": found}
    if not arguments.stock:
        result["routes"] = llm.collective_rpc("vllm_fl_dispatch")
    write_json(Path(arguments.out), result)
    for name, rounds in found.items():
        print("HOST", name, statistics.median(rounds), rounds, flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """The distance and the ratio of two results."""
    a, b = (json.loads(Path(p).read_text()) for p in (arguments.a, arguments.b))
    apart = distance(a, b)
    text = f"logprobs: mean {apart['mean']:.4f}, largest {apart['largest']:.3f}; "
    text += f"same {apart['same']}/{apart['of']}"
    for batch in BATCHES:
        x, y = (r.get(f"batch_{batch}", {}).get("us_per_step") for r in (a, b))
        if x and y:
            text += f"; batch {batch}: {x} / {y} = {x / y:.4f}"
    print(f"COMPARE {Path(arguments.a).stem} to {Path(arguments.b).stem}: {text}")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = found.add_subparsers(required=True)
    one, two, three = (commands.add_parser(name) for name in ("run", "host", "compare"))
    for command in (one, two):
        command.add_argument("model", choices=SHAPES)
        command.add_argument("out")
        command.add_argument("--attention")
        command.add_argument("--stock", action="store_true", help="without the plugin")
        command.add_argument("--dtype", default="bfloat16", help="what the model computes in")
        command.add_argument(
            "--memory", type=float, default=0.4, help="share of the GPU's memory that must be free"
        )
    one.add_argument("--mode", choices=MODES, default="graph")
    one.add_argument("--repeat", type=int, default=3, help="0: answers and routes only")
    one.add_argument("--lock", type=Path, help="the file by which processes share the GPU")
    one.set_defaults(call=run)
    two.add_argument("turns", help="a folder, empty at the start")
    two.add_argument("index", type=int)
    two.add_argument("count", type=int)
    two.add_argument("--rounds", type=int, default=5)
    two.set_defaults(call=host)
    three.add_argument("a")
    three.add_argument("b")
    three.set_defaults(call=compare)
    return found


def main(argv: list[str] | None = None) -> None:
    """Run, measure the host, or compare."""
    chosen = parser().parse_args(argv)
    chosen.call(chosen)


if __name__ == "__main__":
    main()
