# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of, untold
from vllm_fl.backends import Backend
from vllm_fl.cli import bench as command
from vllm_fl.cli.bench import bench, render
from vllm_fl.cli.errors import UsageError
from vllm_fl.cli.main import main
from vllm_fl.dispatch import OpManager, OpRegistry, SelectionPolicy
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import DeviceFacts
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.testing import timing


class Kernel(Backend):
    """silu_and_mul that takes so many microseconds."""

    kind = samples.BackendImplKind.VENDOR
    device_types = ("cpu",)
    us = 0

    def fn(self, x: Any) -> Any:
        end = time.perf_counter() + self.us / 1e6
        while time.perf_counter() < end:
            pass
        return x[..., : x.shape[-1] // 2]


def kernel(name: str, us: int, priority: int = 100, **members: Any) -> Kernel:
    """A backend with one implementation, `vendor.<name>`."""
    members = {"us": us, "impl_id": f"vendor.{name}", "vendor": name, **members}
    made = type(name.title(), (Kernel,), {"priority": priority, **members})()
    made.implements("silu_and_mul", supports=members.get("supports"))(made.fn)
    return made


def manager(*kernels: Kernel, policy: SelectionPolicy | None = None) -> OpManager:
    registry = OpRegistry()
    registry.plugins = ()
    registry.declare(SILU_AND_MUL.signature)
    for made in kernels:
        registry.register_many(made.implementations)
    config = Config(policy=policy or SelectionPolicy())
    return OpManager(registry, config=config, device=DeviceFacts("cpu", "cpu"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(timing, "SAMPLE_S", 0.002)


SLOW, FAST = kernel("slow", 400, priority=110), kernel("fast", 50)


def of(**options: Any) -> dict[str, Any]:
    return {"tokens": [2], "hidden": 16, **options}


def test_the_fastest_is_named_beside_the_one_that_the_policy_chooses() -> None:
    data = bench(manager(SLOW, FAST), "silu_and_mul", **of())
    [size] = data["sizes"]
    assert (data["op"], data["device"], data["dtype"]) == ("silu_and_mul", "cpu", "bfloat16")
    assert size["arguments"] == {"x": "bfloat16[2, 32]"}
    assert (size["policy"], size["fastest"]) == ("vendor.slow", "vendor.fast")
    assert [row["impl_id"] for row in size["timings"]] == ["vendor.fast", "vendor.slow"]
    fast, slow = size["timings"]
    assert slow["ratio"] == 1.0
    assert 0.02 < fast["ratio"] < 0.6
    assert fast["ratio"] == pytest.approx(fast["device_us"] / slow["device_us"], abs=2e-3)
    said = text_of(render, data)
    assert "vendor.fast is the fastest, and the policy chooses vendor.slow; see that it" in said
    assert "vllm-fl verify --impl vendor.fast" in said


def test_two_that_cannot_be_told_apart_have_no_winner(monkeypatch) -> None:
    monkeypatch.setattr(timing, "fastest", lambda timings: None)
    data = bench(manager(SLOW, FAST), "silu_and_mul", **of())
    assert data["sizes"][0]["fastest"] is None
    assert "no winner: the fastest ones are within each other's spread" in text_of(render, data)


def test_an_order_makes_the_policy_s_choice_and_each_is_bound_all_the_same() -> None:
    order = SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:fast",)),), strict=True)
    data = bench(manager(SLOW, FAST, policy=order), "silu_and_mul", **of())
    assert data["sizes"][0]["policy"] == "vendor.fast"
    assert {row["impl_id"] for row in data["sizes"][0]["timings"]} == {"vendor.fast", "vendor.slow"}
    assert "vendor.fast is the fastest, and the policy's choice" in text_of(render, data)


class Broken(Kernel):
    def load(self) -> None:
        raise OSError("no libacme.so")


def test_what_cannot_run_is_told_with_the_reason_and_where() -> None:
    def few(x: Any) -> bool | str:
        return x.shape[0] < 4 or f"{x.shape[0]} rows are 4 or more"

    def raises(self: Any, x: Any) -> Any:
        raise RuntimeError("launch failed\nmore")

    kernels = [
        SLOW,
        kernel("few", 50, supports=few),
        kernel("npu", 50, device_types=("npu",)),
        kernel("bad", 50, fn=raises),
        kernel("broken", 50, load=Broken.load),
    ]
    crashed = {"vendor.fast": "the process that tried it was killed by SIGSEGV"}
    data = bench(manager(*kernels, FAST), "silu_and_mul", **of(tokens=[2, 8]), crashed=crashed)
    small, large = ({e["impl_id"]: e["reason"] for e in s["refused"]} for s in data["sizes"])
    assert small == {
        "vendor.npu": "runs on npu, this device is cpu",
        "vendor.bad": "it raised RuntimeError: launch failed",
        "vendor.broken": small["vendor.broken"],
        "vendor.fast": "the process that tried it was killed by SIGSEGV",
    }
    assert "no libacme.so" in small["vendor.broken"]
    assert large["vendor.few"] == "8 rows are 4 or more"
    said = text_of(render, data)
    assert "not timed at 8 tokens: vendor.few: 8 rows are 4 or more" in said
    assert "not timed: vendor.npu: runs on npu, this device is cpu" in said


def test_those_that_are_named_are_timed_against_the_policy_s_choice() -> None:
    other = kernel("other", 100)
    data = bench(manager(SLOW, FAST, other), "silu_and_mul", impls=["vendor.fast"], **of())
    assert {row["impl_id"] for row in data["sizes"][0]["timings"]} == {"vendor.fast", "vendor.slow"}


def test_on_another_device_than_this_machine_s_first_the_choice_is_that_one_s() -> None:
    manager_ = manager(SLOW, kernel("npu", 50, device_types=("npu",)))
    manager_.set_device(DeviceFacts("ascend", "npu"))
    data = bench(manager_, "silu_and_mul", device="cpu", **of())
    assert data["sizes"][0]["policy"] == "vendor.slow"


def test_the_text_tells_all_that_the_data_tell() -> None:
    data = bench(manager(SLOW, FAST), "silu_and_mul", **of())
    codes = ("spread", "ratio", "tokens", "device_us", "host_us")  # rounded otherwise
    assert untold(render, data, codes) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"op": "silu_and_mlu"}, "no contract for the op 'silu_and_mlu', to make inputs of. Did"),
        ({"impls": ["vendor.fats"]}, "no implementation 'vendor.fats' of silu_and_mul; valid: ven"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int4"}, "unknown dtype 'int4' for silu_and_mul; valid: bfloat16"),
        ({"shapes": {"y": [1]}}, "silu_and_mul has no array 'y'; valid: x."),
        ({"values": {"x": 1}}, "silu_and_mul has no scalar argument 'x'"),
        ({"shapes": {"": [3]}, "tokens": None, "hidden": None}, "silu_and_mul: x must be T[..., 2"),
        (
            {"tokens": [2**31 - 1], "hidden": 2**31 - 2},
            "silu_and_mul: x must have sizes from 0 up, and at most 2**63-1 bytes in all; with "
            "these arguments it would be [2147483647, 4294967292]. Give other sizes",
        ),
        (
            {"tokens": [10**6], "hidden": 10**8},
            "silu_and_mul: arguments of these sizes need about 4e+06 GB of memory, and ",
        ),
    ],
)
def test_what_nobody_knows_is_wrong_usage(options, problem: str) -> None:
    asked = {"op": "silu_and_mul", **of(), **options}
    with pytest.raises(UsageError) as caught:
        bench(manager(SLOW, FAST), **asked)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "-3", "99999999999"])
def test_sizes_that_are_none_are_wrong_usage(capsys, tokens: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rms_norm", f"--tokens={tokens}"])
    assert ended.value.code == 2
    said = f'must be numbers such as 1,32,512, from 1 to 2147483647, found "{tokens}"'
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hidden", ["-8", "0"])
def test_a_row_has_at_least_one_element(capsys, hidden: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rms_norm", "--hidden", hidden])
    assert ended.value.code == 2
    said = f'argument --hidden: must be a whole number of at least 1, found "{hidden}"'
    assert said in capsys.readouterr().err


def test_without_sizes_a_decode_step_a_batch_and_a_prefill_are_timed() -> None:
    data = bench(manager(FAST), "silu_and_mul")
    assert [size["tokens"] for size in data["sizes"]] == [1, 32, 512]
    assert data["sizes"][2]["arguments"] == {"x": f"bfloat16[512, {2 * command.HIDDEN}]"}
    assert "one implementation alone: nothing to compare with" in text_of(render, data)


def test_on_this_machine_it_is_json_and_a_crash_leaves_out_what_crashed(modules) -> None:
    crash = (
        "import os\n"
        "from vllm_fl.dispatch import BackendImplKind, OpImpl\n"
        "def register(registry):\n"
        "    registry.register_impl(OpImpl('silu_and_mul', 'vendor.crash', "
        "BackendImplKind.VENDOR, lambda x: os._exit(9), 'crash', 90))\n"
    )
    done = run(
        "bench", "silu_and_mul", "--json", "--tokens", "2", "--hidden", "16",
        "--impl", "vendor.crash", path=[modules(vllm_fl_crash=crash)],
        env={"VLLM_FL_PLUGIN_MODULES": "vllm_fl_crash"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [size] = json.loads(done.stdout)["sizes"]
    assert size["refused"] == [
        {
            "impl_id": "vendor.crash",
            "reason": "the process that tried it ended with exit code 9",
        }
    ]
    assert [row["impl_id"] for row in size["timings"]] == [size["policy"]]
