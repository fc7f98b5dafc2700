# SPDX-License-Identifier: Apache-2.0
"""Time per call of the CPU kernels, side by side in one process: ours as vLLM's layers call them
(`bound`: guard and kernel), the bare function, the same kernel through torch.ops, vLLM's kernel
and PyTorch. For fused_qk_norm_rope, of which vLLM has no CPU kernel, its column is our kernels of
the norms and the rotary embedding one after the other.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py

Each number is the fastest of many single calls, in microseconds: the machine's other work only
ever adds. Sizes are those of the demo's model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_fl.backends.reference.impl import normalization, qk_norm_rope, rotary
from vllm_fl.backends.vendor.cpu.fl import kernels
from vllm_fl.dispatch import get_default_manager

TOKENS = (1, 8, 64, 512)
COLUMNS = ("tokens", "op", "bound", "function", "torch.ops", "vLLM", "PyTorch")


def fastest(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> float:
    """Microseconds of the fastest call, without the clock's own."""
    clock = time.perf_counter_ns

    def once(call: Callable[..., Any], given: tuple[Any, ...]) -> int:
        start = clock()
        call(*given)
        return clock() - start

    for _ in range(20):
        fn(*args)
    own = min(once(lambda: None, ()) for _ in range(1000))
    best, end = 10**12, clock() + int(seconds * 1e9)
    while clock() < end:
        best = min(best, *(once(fn, args) for _ in range(10)))
    return (best - own) / 1000


def silu(x: torch.Tensor) -> torch.Tensor:
    """As vLLM's own forward."""
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def one_by_one(
    qkv: torch.Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    position_ids: torch.Tensor,
) -> Any:
    """As Qwen3's own forward, with our kernels."""
    q, k, v = qkv.split([n * head_dim for n in (num_heads_q, num_heads_k, num_heads_v)], dim=-1)
    q_by_head = q.view(*q.shape[:-1], q.shape[-1] // head_dim, head_dim)
    q = kernels.rms_norm(q_by_head, q_weight, eps, None).view(q.shape)
    k_by_head = k.view(*k.shape[:-1], k.shape[-1] // head_dim, head_dim)
    k = kernels.rms_norm(k_by_head, k_weight, eps, None).view(k.shape)
    return kernels.rotary_embedding(position_ids, q, k, head_dim, cos_sin_cache, is_neox), v


def rows(tokens: int, dtype: torch.dtype, theirs: Any) -> dict[str, tuple[Any, ...]]:
    """For each op: arguments, the bare function, torch.ops, vLLM's kernel with its arguments,
    PyTorch."""
    ours = torch.ops.vllm_fl_C
    gated = torch.randn(tokens, 3072).to(dtype)
    half = torch.empty(tokens, 1536, dtype=dtype)
    x, residual = torch.randn(tokens, 576).to(dtype), torch.randn(tokens, 576).to(dtype)
    out, weight = torch.empty_like(x), torch.rand(576).to(dtype)
    query, key, _ = torch.randn(tokens, 960).to(dtype).split((576, 192, 192), dim=-1)
    rope = (torch.arange(tokens), query, key, 64, torch.randn(2048, 64).to(dtype), True)
    # Written in place again and again, values must neither grow nor become subnormal.
    ones, angles = torch.ones(64, dtype=dtype), 6.3 * torch.rand(2048, 32)
    turns = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    qkv = torch.randn(tokens, 960).to(dtype)
    whole = (qkv, 9, 3, 3, 64, 1e-6, ones, ones, turns, True, torch.arange(tokens))
    norm, fused = (x, weight, 1e-6, None), (x, residual, weight, 1e-6, None)
    return {
        "silu_and_mul": (
            (gated,), kernels.silu_and_mul, ours.silu_and_mul,
            (theirs.silu_and_mul, (half, gated)), silu,
        ),
        "rms_norm": (
            norm, kernels.rms_norm, ours.rms_norm,
            (theirs.rms_norm, (out, x, weight, 1e-6)), normalization.rms_norm,
        ),
        "fused_add_rms_norm": (
            fused, kernels.fused_add_rms_norm, ours.fused_add_rms_norm_,
            (theirs.fused_add_rms_norm, fused[:4]), normalization.fused_add_rms_norm,
        ),
        "rotary_embedding": (
            rope, kernels.rotary_embedding, ours.rotary_embedding_,
            (theirs.rotary_embedding, rope), rotary.rotary_embedding,
        ),
        "fused_qk_norm_rope": (
            whole, kernels.fused_qk_norm_rope, ours.fused_qk_norm_rope_,
            (one_by_one, whole), qk_norm_rope.fused_qk_norm_rope,
        ),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seconds", type=float, default=0.1, help="for each number")
    arguments = parser.parse_args()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    manager = get_default_manager()
    print(f"{kernels.cpu_capability()}, {torch.get_num_threads()} thread(s), {arguments.dtype}\n")
    print("|" + "|".join(f" {name} " for name in COLUMNS) + "|")
    print("|" + "---|" * len(COLUMNS))
    with torch.inference_mode():
        for tokens in TOKENS:
            ops = rows(tokens, getattr(torch, arguments.dtype), torch.ops._C)
            for op, (args, function, torch_op, (theirs, their_args), native) in ops.items():
                signature = manager.registry.get_signature(op)
                facts = signature.facts_of(*args) if signature and signature.facts else {}
                calls = (
                    (manager.bind(op, donate=True, **facts), args),
                    (function, args),
                    (torch_op, args),
                    (theirs, their_args),
                    (native, args),
                )
                times = (f"{fastest(fn, a, arguments.seconds):.2f}" for fn, a in calls)
                print(f"| {tokens} | {op} | " + " | ".join(times) + " |")


if __name__ == "__main__":
    main()
