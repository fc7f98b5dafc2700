# SPDX-License-Identifier: Apache-2.0
"""A forked CUDA worker under FlagGems: the parent that loaded the plugin never touches the device.

    VLLM_FL_PREFER=flagos python benchmarks/gpu/fork.py

Starts an engine in a forked process of its own, generates, and prints what the worker's route
table says and whether CUDA was initialised, and flag_gems imported, in the parent. Exit code 1
where either was, or where nothing of FlagGems ran.
"""

from __future__ import annotations

import os
import sys

from model import write_config


def main() -> int:
    """Run one engine; 0 if the parent stayed clean."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    import torch
    from vllm import LLM, SamplingParams
    from vllm.utils.system_utils import _maybe_force_spawn

    _maybe_force_spawn()
    method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    llm = LLM(
        write_config("q06"),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        attention_backend="TRITON_ATTN",
    )
    wanted = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], wanted, use_tqdm=False)
    (reply,) = llm.collective_rpc("vllm_fl_dispatch")
    served = {row["impl_id"] for row in reply["ops"]}
    print(f"worker process: {method}; {len(answer.outputs[0].token_ids)} tokens; by {served}")
    in_parent = torch.cuda.is_initialized(), "flag_gems" in sys.modules
    print(f"in the parent: CUDA initialised {in_parent[0]}, flag_gems imported {in_parent[1]}")
    return int(any(in_parent) or "default.flaggems" not in served or method != "fork")


if __name__ == "__main__":
    sys.exit(main())
