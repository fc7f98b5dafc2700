# SPDX-License-Identifier: Apache-2.0
"""Our CPU kernels round where the reference rounds, so half precision hardly moves."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.backends.vendor.cpu import fl, register_ops  # noqa: F401  (importing registers)
from vllm_fl.ops import CONTRACTS

IMPLS = {impl.op_name: impl for impl in fl.backend.implementations}
BY_NAME = {contract.name: contract for contract in CONTRACTS}
WIDTH = 576

pytestmark = pytest.mark.skipif(
    fl.backend.is_available() is not True, reason="vllm_fl was installed without native code"
)


def arguments(op: str, dtype: torch.dtype) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(5)

    def rows(width: int) -> torch.Tensor:
        return torch.randn(256, width, generator=generator).to(dtype)

    if op.endswith("_and_mul") or op == "mul_and_silu":
        return (rows(2 * WIDTH),)
    weight = (torch.rand(WIDTH, generator=generator) + 0.5).to(dtype)
    tensors = (rows(WIDTH), rows(WIDTH)) if op.startswith("fused_add") else (rows(WIDTH),)
    return (*tensors, weight, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", sorted(set(IMPLS) - {"rotary_embedding", "fused_qk_norm_rope"}))
def test_less_than_one_element_in_a_thousand_differs_from_the_reference(op, dtype) -> None:
    fl.backend.load()
    args = arguments(op, dtype)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    found, expected = IMPLS[op].fn(*copies), BY_NAME[op].reference(*args)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for ours, theirs in pairs:
        assert (ours != theirs).float().mean() < 1e-3
