# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.fakes import dtype_of, fake_call

BY_NAME = {contract.name: contract for contract in CONTRACTS}
RMS_NORM, ROTARY = BY_NAME["rms_norm"], BY_NAME["rotary_embedding"]


def made(contract=RMS_NORM, device_type="cpu", dtype=None, values=None, **shapes):
    shapes = {name.replace("main", ""): shape for name, shape in shapes.items()}
    return fake_call(
        contract, shapes=shapes, values=values or {}, dtype=dtype, device_type=device_type
    )


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_every_contract_gives_a_call_that_its_fake_takes(contract) -> None:
    call = made(contract)
    with torch._guards.detect_fake_mode(call.args) or pytest.fail("no fake tensors"):
        contract.fake(*call.args)
    assert call.given == {}
    assert list(call.assumed) == list(contract.signature.parameter_names)


def test_the_other_arguments_follow_the_one_that_is_given() -> None:
    call = made(main=(32, 4096), dtype=torch.float16)
    assert call.given == {"x": "float16[32, 4096]"}
    assert call.assumed == {
        "weight": "float16[4096]",
        "epsilon": "1e-06",
        "variance_size": "None",
    }
    x, weight, epsilon, variance_size = call.args
    assert (x.shape, x.dtype, x.device.type) == ((32, 4096), torch.float16, "cpu")
    assert (weight.shape, epsilon, variance_size) == ((4096,), 1e-6, None)


def test_the_argument_under_test_is_the_first_of_the_dtype_under_test() -> None:
    call = made(ROTARY, main=(16, 4096), values={"head_size": 128})
    assert call.given == {"query": "bfloat16[16, 4096]", "head_size": "128"}
    assert call.assumed["positions"] == "int64[16]"


def test_an_alternative_form_is_followed_by_the_other_arguments() -> None:
    call = made(ROTARY, main=(16, 32, 64))
    assert (
        len(dict(zip(ROTARY.signature.parameter_names, call.args, strict=True))["key"].shape) == 3
    )


def test_sizes_that_are_given_twice_must_agree() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight must be float\[hidden\]\?, found"):
        made(main=(4, 64), weight=(65,))
    call = made(main=(4, 64), weight=(64,))
    assert set(call.given) == {"x", "weight"}


def test_the_tensors_hold_no_data() -> None:
    call = made(main=(1 << 20, 1 << 20))
    assert call.args[0].numel() == 1 << 40


def test_a_device_that_this_torch_does_not_know_is_told() -> None:
    call = made(main=(4, 64), device_type="acme")
    assert (call.on_device, call.args[0].device.type) == (False, "cpu")


def test_a_device_that_is_not_here_is_as_good_as_one_that_is() -> None:
    call = made(main=(4, 64), device_type="cuda")
    assert (call.on_device, call.args[0].device.type) == (True, "cuda")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"y": (4,)}, "rms_norm has no array 'y'; valid: x, weight."),
        (
            {"values": {"epsilom": 1.0}},
            "rms_norm has no scalar argument 'epsilom'; valid: epsilon, variance_size. "
            'Did you mean "epsilon"?',
        ),
        ({"main": ()}, "rms_norm: x must be T[..., hidden], found bfloat16[]: 0 dimensions"),
        (
            {"main": (4, 64), "values": {"variance_size": 65}},
            "rms_norm needs variance_size is None or variance_size <= hidden; with these "
            "arguments it does not hold",
        ),
        (
            {"main": (99999999999, 99999999999)},
            "rms_norm: x must have sizes from 0 up, and at most 2**63-1 bytes in all; with these "
            "arguments it would be [99999999999, 99999999999]. Give other sizes",
        ),
        (
            {"main": (10**40, 0)},
            "rms_norm: x must have sizes from 0 up, and at most 2**63-1 bytes in all; with these "
            "arguments it would be [..., 0]. Give other sizes",
        ),
        (
            {"contract": ROTARY, "values": {"head_size": -64}},
            "rotary_embedding needs rotary_dim <= head_size; with these arguments it does not hold",
        ),
        (
            {"values": {"epsilon": "small"}},
            "rms_norm: epsilon must be a number, found 'small' of type str; the op is rms_norm(x, "
            "weight, epsilon, variance_size=None)",
        ),
        (
            {"contract": BY_NAME["rms_norm_gated"], "values": {"group_size": 0}},
            "rms_norm_gated needs group_size is None or hidden % group_size == 0; with these "
            "arguments it does not hold",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_valid_names(options, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(**options)
    assert str(caught.value) == problem


def test_a_dtype_is_one_of_the_contracts() -> None:
    assert dtype_of(RMS_NORM, "float32") is torch.float32
    with pytest.raises(ValueError) as caught:
        dtype_of(RMS_NORM, "bfloat61")
    assert str(caught.value) == (
        "unknown dtype 'bfloat61' for rms_norm; valid: bfloat16, float16, float32. "
        'Did you mean "bfloat16"?'
    )
