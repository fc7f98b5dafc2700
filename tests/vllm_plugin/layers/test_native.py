# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers on our own CPU kernels: also what vLLM's kernels refuse."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tests.backends.helpers import DTYPES, name_of, randn

pytestmark = pytest.mark.usefixtures("native")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def served_by_ours(rows) -> None:
    for row in rows().values():
        refused = {refusal["impl_id"] for refusal in row["rejected"]}  # vLLM's, for some sizes
        assert row["impl_id"] == "vendor.cpu.fl" and refused <= {"vendor.cpu"}


@each_dtype
@pytest.mark.parametrize("size", (61, 64))
def test_norms_of_any_size_and_of_slices_are_served(both, rows, size, dtype) -> None:
    stock, ours = both(RMSNorm, size, dtype=dtype)
    x, residual = (randn((5, 3 * size), dtype, seed=s)[:, :size] for s in (1, 2))
    torch.testing.assert_close(ours(x), stock(x))
    expected = stock(x.clone(), residual.clone())
    out, total = ours(x.clone(), residual.clone())
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(total, expected[1])
    served_by_ours(rows)


@each_dtype
@pytest.mark.parametrize("cls", (SiluAndMul, GeluAndMul))
def test_gates_of_any_size_are_served(both, rows, cls, dtype) -> None:
    stock, ours = both(cls)
    x = randn((5, 2 * 61), dtype)
    torch.testing.assert_close(ours(x), stock(x))
    served_by_ours(rows)


@each_dtype
def test_a_rotation_of_a_size_that_no_vector_divides_is_served(both, rows, dtype) -> None:
    stock, ours = both(RotaryEmbedding, 36, 20, 64, 10000, True, dtype)
    positions = torch.arange(5)
    query, key, _ = randn((5, 7 * 36), dtype).split((3 * 36, 2 * 36, 2 * 36), dim=-1)
    expected = stock.forward_native(positions, query.clone(), key.clone())
    found = ours(positions, query.clone(), key.clone())
    # Products of up to 4, each rounded there and not here: half a last place for each, and the sum.
    limit = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    served_by_ours(rows)
