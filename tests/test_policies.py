# SPDX-License-Identifier: Apache-2.0
"""The policies that ship with vllm_fl: they load, name what there is, and decide as they say."""

from __future__ import annotations

from pathlib import Path

import pytest

import vllm_fl
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.config import load_config
from vllm_fl.dispatch.types import DeviceFacts

POLICIES = sorted((Path(vllm_fl.__file__).parent / "policies").glob("*.yaml"))


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.stem)
def test_a_shipped_policy_names_only_what_there_is_and_says_what_was_measured(path) -> None:
    manager = OpManager()
    manager.ensure_initialized()
    config = load_config({}, shipped=path)
    config.check_against(manager.registry.snapshot())
    assert config.policy.per_op_order
    text = path.read_text(encoding="utf-8")
    assert "benchmarks/RESULTS.md" in text and "easured" in text


def test_on_nvidia_vllms_own_kernels_come_before_flaggems_in_eager_mode_only() -> None:
    manager = OpManager()
    manager.set_device(DeviceFacts("cuda", "cuda", "NVIDIA H200"))
    manager.ensure_initialized()
    eager = manager.policy_in_force.order_for("silu_and_mul", "eager")
    assert eager == ("vendor:cuda", "flagos")
    assert manager.policy_in_force.order_for("silu_and_mul", "compiled") == ()
