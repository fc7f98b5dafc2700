# SPDX-License-Identifier: Apache-2.0
"""What a layer said of itself when it was built is checked again where memory is at stake."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.dispatch import OpManager

FACTS = {"hidden_size": 64, "weight_dtype": torch.float32, "weight_size": 64, "variance_size": None}


@pytest.mark.parametrize("width", [32, 128, 4096])
def test_rows_of_another_size_than_the_bound_weight_raise_as_the_reference_does(width) -> None:
    manager = OpManager()
    for name, rows in (("rms_norm", 1), ("fused_add_rms_norm", 2)):
        fn = manager.bind(name, **FACTS)
        with pytest.raises(RuntimeError, match="must match the size"):
            fn(*(torch.randn(2, width) for _ in range(rows)), torch.randn(64), 1e-6)


def test_a_weight_that_is_a_column_gives_the_references_answer() -> None:
    x, column = torch.randn(64, 64), torch.randn(64, 1)
    manager = OpManager()
    reference = manager.registry.get_implementation
    found = manager.call("rms_norm", x, column, 1e-6)
    assert torch.equal(found, reference("rms_norm", "reference.torch").fn(x, column, 1e-6))


@pytest.mark.parametrize("cache", [torch.randn(0, 16), torch.randn(2, 8, 16)], ids=["empty", "3-D"])
def test_a_cache_without_rows_or_with_three_dimensions_is_refused(cache) -> None:
    x = torch.randn(4, 64)
    with pytest.raises((IndexError, RuntimeError)):
        OpManager().call("rotary_embedding", torch.arange(4), x, x.clone(), 16, cache, True)


def test_where_a_gradient_is_required_the_reference_gives_one() -> None:
    manager = OpManager()
    x = torch.randn(3, 64, requires_grad=True)
    calls = {
        "silu_and_mul": (x,),
        "gelu_and_mul": (x,),
        "rms_norm": (x, torch.ones(64), 1e-6),
        "fused_add_rms_norm": (x, torch.randn(3, 64), torch.ones(64), 1e-6),
    }
    for name, args in calls.items():
        out = manager.call(name, *args)
        assert (out[0] if isinstance(out, tuple) else out).requires_grad, name
