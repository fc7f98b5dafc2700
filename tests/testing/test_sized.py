# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.ops.normalization import RMS_NORM
from vllm_fl.ops.quantization import DYNAMIC_PER_TOKEN_QUANT_INT8
from vllm_fl.ops.rotary import ROTARY_EMBEDDING
from vllm_fl.testing import sized
from vllm_fl.testing.cases import arguments_of
from vllm_fl.testing.sized import has_hidden, sized_arguments

NONE = {"shapes": {}, "values": {}}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.name)
def test_every_op_that_ships_takes_arguments_of_a_size(contract) -> None:
    dtype = next(iter(contract.tolerances))
    hidden = 128 if has_hidden(contract) else None
    args, text = sized_arguments(contract, dtype, tokens=5, hidden=hidden, **NONE)
    assert set(text) == set(contract.signature.parameter_names)
    contract.reference(*args)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    assert any(5 in t.shape for t in tensors)
    assert hidden is None or any(128 in t.shape or 256 in t.shape for t in tensors)
    assert all(t.is_contiguous() for t in tensors)


def test_the_sizes_are_those_of_all_arrays_that_share_the_axis() -> None:
    (x, weight, *_), text = sized_arguments(RMS_NORM, torch.float16, tokens=3, hidden=40, **NONE)
    assert (x.shape, x.dtype, weight.shape) == ((3, 40), torch.float16, (40,))
    assert text["x"] == "float16[3, 40]"
    (x,), _ = sized_arguments(SILU_AND_MUL, torch.float32, tokens=3, hidden=40, **NONE)
    assert x.shape == (3, 80)


def test_the_values_are_the_contract_s_own_again_and_again() -> None:
    dtype = torch.bfloat16
    example = arguments_of(ROTARY_EMBEDDING, ROTARY_EMBEDDING.cases_for(dtype)[0], dtype)
    (positions, *_), _ = sized_arguments(ROTARY_EMBEDDING, dtype, tokens=100, **NONE)
    assert positions.shape == (100,)
    assert set(positions.tolist()) == set(example[0].flatten().tolist())


def test_shapes_and_values_that_are_given_are_taken() -> None:
    args, text = sized_arguments(
        ROTARY_EMBEDDING,
        torch.bfloat16,
        shapes={"": (6, 512)},
        values={"head_size": 128, "is_neox": False},
    )
    assert (args[1].shape, args[0].shape, args[5]) == ((6, 512), (6,), False)
    assert text["head_size"] == "128"
    args, _ = sized_arguments(
        ROTARY_EMBEDDING, torch.bfloat16, tokens=4, shapes={}, values={"head_size": 128}
    )
    assert args[1].shape[0] == 4 and args[1].shape[1] % 128 == 0


def test_an_axis_that_the_op_does_not_have_is_refused() -> None:
    assert not has_hidden(ROTARY_EMBEDDING)
    with pytest.raises(ValueError, match="rotary_embedding has no axis for hidden; give a --shape"):
        sized_arguments(ROTARY_EMBEDDING, torch.bfloat16, hidden=64, **NONE)
    with pytest.raises(ValueError, match="has no array 'y'; valid: x"):
        sized_arguments(DYNAMIC_PER_TOKEN_QUANT_INT8, torch.bfloat16, shapes={"y": (4,)}, values={})


def test_arguments_beyond_the_memory_that_is_free_are_not_made(monkeypatch) -> None:
    """1000 x 1000 bfloat16 twice, a weight of 1000, and two indices: 20 MB."""
    monkeypatch.setattr(sized, "_free_bytes", lambda: 19 * 10**6)
    with pytest.raises(ValueError) as caught:
        sized_arguments(RMS_NORM, torch.bfloat16, tokens=1000, hidden=1000, **NONE)
    assert str(caught.value) == (
        "rms_norm: arguments of these sizes need about 0.02 GB of memory, and 0.019 GB are free; "
        "give smaller sizes"
    )
    monkeypatch.setattr(sized, "_free_bytes", lambda: 21 * 10**6)
    assert sized_arguments(RMS_NORM, torch.bfloat16, tokens=1000, hidden=1000, **NONE)
    monkeypatch.setattr(sized, "_free_bytes", lambda: None)  # nobody knows
    assert sized_arguments(RMS_NORM, torch.bfloat16, tokens=1000, hidden=1000, **NONE)


def test_memory_that_is_refused_in_the_end_is_told(monkeypatch) -> None:
    def refuse(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it")

    monkeypatch.setattr(sized, "_filled", refuse)
    with pytest.raises(ValueError) as caught:
        sized_arguments(RMS_NORM, torch.bfloat16, tokens=1, **NONE)
    assert str(caught.value) == (
        "rms_norm: there is not enough memory for arguments of these sizes (CUDA out of memory.); "
        "give smaller ones"
    )
