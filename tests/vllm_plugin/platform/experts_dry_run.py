# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: a Qwen3-MoE's layer under PlatformFL, on the CPU.

The platform is that of an NVIDIA GPU with an `empty` vLLM, and says of itself that torch calls its
device "cpu". The products of the experts, a Triton kernel, are PyTorch's. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "e2e" / "emulated_experts")]

import dry_run  # noqa: E402  (it stands beside this file)
import emulated_experts  # noqa: E402

MODEL = {
    **dry_run.MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def main(folder: str) -> None:
    dry_run.fake_nvml((9, 0))
    from vllm_fl.vllm_plugin import platform_choice

    platform_choice.has_extension = lambda: False
    import vllm.platforms

    from vllm_fl.vllm_plugin import hooks, plugin
    from vllm_fl.vllm_plugin import platform as ours

    vllm.platforms.current_platform = ours.PlatformFL()
    import torch
    import vllm.triton_utils
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    hooks.when_imported(emulated_experts.EXPERTS, emulated_experts.multiplying)
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = EngineArgs(
        model=folder, max_model_len=256, skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    on_cpu = [
        mock.patch.object(ours.PlatformFL, name, "cpu") for name in ("device_name", "device_type")
    ]
    with mock.patch("vllm.triton_utils.HAS_TRITON", True), set_current_vllm_config(config):
        for patch in on_cpu:
            patch.start()
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.float32)
        print(json.dumps(layer_of(config)))


def layer_of(config: Any) -> dict[str, Any]:
    """A layer's experts are built, given weights and called; how far is it from the ops?"""
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
    from vllm.v1.worker.workspace import init_workspace_manager

    from vllm_fl.ops.moe import FUSED_EXPERTS, TOPK_SOFTMAX
    from vllm_fl.vllm_plugin.functions import FUNCTIONS, serve
    from vllm_fl.vllm_plugin.routes import route_rows, rpc

    block = Qwen3MoeSparseMoeBlock(config, prefix="model.layers.0.mlp")
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        scale = parameter.shape[-1] ** -0.5
        parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    process_weights_after_loading(block, config.model_config, torch.device("cpu"))
    serve.bind(FUNCTIONS)
    rpc(None, "count")
    init_workspace_manager(torch.device("cpu"))
    torch.accelerator.empty_cache = lambda: None  # there is none
    x = torch.randn(20, 64, generator=generator)
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=20):
        # The opaque operator has a kernel for "CUDA"; what it runs is called instead.
        experts = block.experts
        found = experts._forward_impl(x.clone(), x, None)
        logits, _ = block.gate(x)
    weights, ids = TOPK_SOFTMAX.reference(logits, 2, True)
    routed = experts.routed_experts
    args = (x, routed.w13_weight, routed.w2_weight, weights, ids)
    expected = FUSED_EXPERTS.reference(*args)
    method = routed.quant_method
    return {
        "experts": type(method.moe_kernel.fused_experts).__name__,
        "off": float((found - expected).abs().max()),
        "size": float(expected.abs().mean()),
        "calls": {
            row["op"]: [row["impl_id"], row["calls"]] for row in route_rows() if row["calls"]
        },
    }


if __name__ == "__main__":
    main(sys.argv[1])
