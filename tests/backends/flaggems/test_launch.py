# SPDX-License-Identifier: Apache-2.0
"""Launch plans: what they launch is what FlagGems would launch, and they are made only where
nothing else matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from vllm_fl.backends.flaggems import launch, versions

PROGRAM = """
import json, sys
import torch
from tests.backends.flaggems import pretend, plans
print(json.dumps(plans.report()))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """What `plans.report` says in a process of its own, whose kernels are compiled."""
    refusal = versions.reason(versions.flaggems_version(), versions.triton_version())
    if refusal is not None:
        pytest.skip(f"{refusal}; `make test-flaggems` has an environment of its own")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plan_launches_the_same_kernel_with_the_same_arguments(found: Any) -> None:
    assert found["same"] == {name: True for name in found["same"]}
    assert len(found["same"]) >= 8


def test_a_plan_is_made_for_every_layout_of_the_planned_ops(found: Any) -> None:
    assert found["without_a_plan"] == []


def test_new_tensors_and_written_arguments_come_back_as_they_do_from_flaggems(found: Any) -> None:
    assert found["results"] == {name: True for name in found["results"]}


def test_the_host_time_of_a_plan_is_a_fraction(found: Any) -> None:
    """Measured without the launch itself: 132 to 4 us (silu_and_mul), 37 to 6 (rms_norm)."""
    for name, (through, planned) in found["host_us"].items():
        assert planned < through / 2, name


@pytest.mark.parametrize(
    "case",
    ["copies an argument", "allocates inside", "reads a value", "returns a view", "no launch"],
)
def test_where_something_else_matters_there_is_no_plan(found: Any, case: str) -> None:
    assert found["refused"][case]


def test_another_layout_has_another_plan(found: Any) -> None:
    assert found["layouts"] == 3


def test_a_profilers_hook_and_another_device_go_through_flaggems(found: Any) -> None:
    assert found["with_a_hook"] == "called"
    assert found["on_another_device"] == "through flaggems"


def test_plans_are_forgotten_before_they_are_too_many(found: Any) -> None:
    assert found["kept"] <= found["limit"]


def test_other_drivers_than_cudas_have_no_plans(found: Any) -> None:
    assert found["on_hip"] == "no plan"


def test_sizes_that_guards_refuse_do_not_compile_and_their_neighbours_do(found: Any) -> None:
    assert found["uncompiled"] == {
        "rank 37": True,
        "rank 32": False,
        "top 6": True,
        "top 4": False,
    }


class Descriptor:
    """Has a tensor's address inside, as Triton's descriptors for TMA have."""


def test_an_argument_that_may_hide_an_address_is_refused() -> None:
    x = torch.zeros(4, 64)
    for constant in (None, 3, 1e-6, True, "tanh", torch.float16):
        launch._check_constant(0, constant, [x])
    with pytest.raises(launch._NoPlan, match="argument 2 is a Descriptor"):
        launch._check_constant(2, Descriptor(), [x])
    with pytest.raises(launch._NoPlan, match="argument 1 is an address"):
        launch._check_constant(1, x.data_ptr() + 8, [x])
