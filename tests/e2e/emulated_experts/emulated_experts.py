# SPDX-License-Identifier: Apache-2.0
"""The way of a mixture of experts on a GPU without vLLM's extension, on CPU.

On CPU vLLM has a router and experts of its own. This plugin of vLLM (put its folder on PYTHONPATH)
makes it go where PlatformFL makes it go: its general router, and its Triton experts, chosen by
vllm_fl's own hook. Their two products are a Triton kernel; here PyTorch multiplies, and reads the
blocks as that kernel does. What is left are the four functions that vllm_fl serves. A CPU build of
vLLM has a kernel for one of them, the activation, and is said to have none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

FACTORY = "vllm.model_executor.layers.fused_moe.router.router_factory"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.triton_moe"


def register() -> None:
    """The entry point `vllm.general_plugins: fl_emulated_experts`."""
    from vllm_fl.vllm_plugin import hooks, platform_experts
    from vllm_fl.vllm_plugin.functions import serve

    serve.on_cpu = lambda: False
    serve.has_kernels = lambda names: not list(names)
    platform_experts.triton_experts = with_triton(platform_experts.triton_experts)
    hooks.when_imported(platform_experts.METHOD, out_of_tree)
    hooks.when_imported(FACTORY, general_router)
    hooks.when_imported(EXPERTS, multiplying)
    platform_experts.await_method()


def with_triton(choose: Any) -> Any:
    """The choice of the experts, told that there is a Triton."""

    def choose_with_triton(moe_config: Any) -> Any:
        with mock.patch("vllm.triton_utils.HAS_TRITON", True):
            return choose(moe_config)

    return choose_with_triton


def out_of_tree(module: Any) -> None:
    """What vLLM answers on a platform that is not its own."""
    module.select_unquantized_moe_backend = lambda moe_config: (SimpleNamespace(name="OOT"), None)


def general_router(module: Any) -> None:
    class Elsewhere:
        is_cpu = staticmethod(lambda: False)

    module.current_platform = Elsewhere


def multiplying(module: Any) -> None:
    for name in ("float32", "float16", "bfloat16"):
        setattr(module.tl, name, name)
    module.invoke_fused_moe_triton_kernel = multiply


def multiply(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_scale: Any,
    B_scale: Any,
    topk_weights: torch.Tensor | None,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    config: dict[str, Any],
    **_: Any,
) -> None:
    """Row ids[i] of C, for each block of ids, is row ids[i] // top_k of A times the block's
    expert; ids beyond the choices are padding. Without ids each choice is a block."""
    rows = C.view(-1, C.shape[-1])
    if sorted_token_ids is None:
        blocks = list(enumerate(expert_ids.tolist()))
        chosen = [(torch.tensor([choice]), expert) for choice, expert in blocks]
    else:
        size, used = config["BLOCK_SIZE_M"], int(num_tokens_post_padded)
        assert used % size == 0
        chosen = [
            (sorted_token_ids[start : start + size], int(expert_ids[start // size]))
            for start in range(0, used, size)
        ]
    for ids, expert in chosen:
        ids = ids[ids < rows.shape[0]].long()
        product = A[ids // top_k] @ B[expert].t()
        if mul_routed_weight:
            assert topk_weights is not None
            product = product * topk_weights.reshape(-1, 1)[ids]
        rows[ids] = product.to(rows.dtype)
