# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from types import MethodType

import pytest

from tests.cli import samples
from tests.cli.helpers import run, text_of, untold
from vllm_fl.backends.vendor.device_table import DEVICES
from vllm_fl.cli.errors import CommandError, UsageError
from vllm_fl.cli.explain import explain, render
from vllm_fl.cli.main import main
from vllm_fl.dispatch import OpManager, SelectionPolicy, get_default_manager
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.discovery import PluginRecord
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.ops import CONTRACTS

CODES = ("code", "kind", "priority", "device", "asked", "vendor")
"""Machine-readable words for what the text says in sentences."""


def said(data) -> dict[str, str]:
    """impl_id to the reason, for each loser."""
    return {loser["impl_id"]: loser["reason"] for loser in data["losers"]}


def test_the_text_tells_all_that_the_data_tell() -> None:
    assert untold(render, samples.sample_explain(), CODES) == []
    policy = SelectionPolicy(prefer="reference")
    data = explain(samples.manager(Config(policy=policy)), "rms_norm", shapes={"": [3, 5]})
    assert untold(render, data, CODES) == []


def test_it_is_the_decision_of_the_manager() -> None:
    manager = samples.manager()
    data = explain(manager, "silu_and_mul")
    decision = manager.decide("silu_and_mul").to_dict()
    assert {key: data[key] for key in decision if key != "device"} == {
        key: value for key, value in decision.items() if key != "device"
    }
    assert data["device"]["device_class"] == "cpu"


def test_being_switched_off_is_told() -> None:
    data = explain(samples.manager(Config(values={"enabled": False})), "rms_norm")
    assert "but vllm_fl is switched off" in text_of(render, data)


def test_without_a_shape_no_guard_is_asked_and_that_is_told() -> None:
    data = explain(samples.manager(), "rms_norm")
    assert (data["asked"], data["given"], data["assumed"]) == ("none", {}, {})
    assert "guards were not asked; give a --shape" in text_of(render, data)


def test_with_a_shape_the_guards_are_asked_and_what_was_assumed_is_told() -> None:
    data = explain(samples.manager(), "rms_norm", shapes={"": (7, 61)}, dtype="float16")
    assert data["winner"]["impl_id"] == "reference.torch"
    assert said(data)["vendor.cpu"] == "hidden_size 61 is not a multiple of 8"
    assert data["asked"] == "all guards"
    assert data["given"] == {"x": "float16[7, 61]"}
    assert data["assumed"]["weight"] == "float16[61]"
    assert data["facts"]["hidden_size"] == 61


def test_another_vendors_device_is_told_with_what_was_assumed_and_what_is_missing_here() -> None:
    data = explain(samples.manager(), "rms_norm", vendor="acme")
    assert data["winner"]["impl_id"] == "vendor.acme"
    assert data["device"] == {
        "vendor": "acme",
        "device_type": "acme",
        "name": "",
        "arch": "",
        "assumed": True,
        "assumed_modules": ["acme_kernels"],
        "absent_modules": [],
        "device_class": "acme",
    }
    assert said(data)["vendor.cpu"] == "runs on cpu, this device is acme"
    assert data["registered"][0] == {
        "impl_id": "vendor.acme",
        "device_types": ["acme"],
        "vendors": None,
        "requires": ["acme_kernels"],
        "missing": ["acme_kernels"],
        "note": "",
        "unsure": "",
    }


@pytest.mark.parametrize("vendor", ["ascend", "cuda", "metax", "sunrise", "cpu"])
def test_every_vendor_of_the_device_table_can_be_asked_about(vendor: str) -> None:
    data = explain(samples.manager(), "rms_norm", vendor=vendor, shapes={"": (4, 64)})
    assert data["winner"]["impl_id"] == ("vendor.cpu" if vendor == "cpu" else "reference.torch")
    assert data["device"]["assumed_modules"] == []


def test_a_vendor_that_only_registered_is_known_by_its_backends_device_type() -> None:
    manager = samples.manager()
    manager.registry.register_impl(
        samples.impls_of(type("Chip", (samples.Kernels,), {"device_types": ("brandpu",)})(),
                         "vendor.brand", 100)[0]
    )  # fmt: skip
    data = explain(manager, "silu_and_mul", vendor="brand")
    assert data["winner"]["impl_id"] == "vendor.brand"
    assert data["device"]["device_class"] == "brand:brandpu"


def test_chips_with_the_same_device_type_are_told_apart_by_vendor() -> None:
    """What is compiled for one chip does not run on another whose device type is "cuda" too."""
    manager = samples.manager()
    only = {"device_types": ("cuda",), "vendors": ("cuda", "rocm"), "requires": ("cuda_kernels",)}
    chip = type("Chip", (samples.Kernels,), only)()
    manager.registry.register_impl(samples.impls_of(chip, "vendor.cuda", 100)[0])
    for vendor in ("cuda", "rocm"):
        data = explain(manager, "silu_and_mul", vendor=vendor)
        assert data["winner"]["impl_id"] == "vendor.cuda"
        assert data["device"]["assumed_modules"] == ["cuda_kernels"]
    data = explain(manager, "silu_and_mul", vendor="metax")
    assert said(data)["vendor.cuda"] == "runs on chips of cuda or rocm, this one is metax's"
    assert data["device"]["assumed_modules"] == []
    assert "cuda of cuda, rocm" in text_of(render, data)


def test_compiled_is_left_to_the_compiler_where_vllm_has_the_layer() -> None:
    data = explain(samples.manager(), "rms_norm", mode="compiled")
    assert (data["winner"]["impl_id"], data["reason"]) == ("native", "left to the compiler")
    order = SelectionPolicy(per_op_order={"rms_norm@compiled": ["vendor:cpu"]})
    data = explain(samples.manager(Config(policy=order)), "rms_norm", mode="compiled")
    assert data["winner"]["impl_id"] == "vendor.cpu"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"op": "rms_nrom"}, "unknown op 'rms_nrom'; known: rms_norm, silu_and_mul. Did you mean"),
        ({"op": "rms_nrom", "dtype": "float16"}, "unknown op 'rms_nrom'"),
        ({"op": "rms_norm", "vendor": "acne"}, '--vendor: unknown vendor "acne"; valid: acme, '),
        ({"op": "rms_norm", "dtype": "half"}, "unknown dtype 'half' for rms_norm; valid: bfloat16"),
        ({"op": "rms_norm", "shapes": {"y": (1,)}}, "rms_norm has no array 'y'; valid: x, weight."),
    ],
)
def test_what_nobody_knows_is_wrong_usage(options, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(samples.manager(), **options)
    assert str(caught.value).startswith(problem)


def test_an_op_without_a_contract_is_explained_without_arguments() -> None:
    manager = samples.manager()
    impl = samples.impls_of(samples.Cpu(), "vendor.cpu", 100)[0]
    manager.registry.register_impl(
        type(impl)("own_op", "vendor.cpu", impl.kind, impl.fn, "cpu", 100)
    )
    assert explain(manager, "own_op")["winner"]["impl_id"] == "vendor.cpu"
    with pytest.raises(UsageError, match=r"own_op has no contract in vllm_fl, .* leave out --sh"):
        explain(manager, "own_op", shapes={"": (4,)})


def test_where_our_own_ops_are_missing_an_unknown_op_is_no_wrong_usage() -> None:
    registry = OpRegistry()
    registry.plugins = (
        PluginRecord("vllm_fl.ops", "builtin", "", "vllm-fl", "0", 0.0, error="no torch"),
    )
    with pytest.raises(CommandError, match=r"Note: vllm_fl.ops failed \(no torch\)") as caught:
        explain(OpManager(registry, config=Config()), "rms_norm")
    assert type(caught.value) is CommandError


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--shape", "4,x"], 'must be sizes such as 32,4096 or key=32,1024, found "4,x"'),
        (["--shape", "4,-1"], 'found "4,-1"'),
        (["--shape", "=4"], 'found "=4"'),
        (["--set", "epsilon"], 'must be NAME=VALUE, found "epsilon"'),
        (["--mode", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_a_malformed_option_is_wrong_usage(capsys, arguments: list[str], problem: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "rms_norm", *arguments])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_name_that_only_the_child_can_check_is_exit_code_2(without) -> None:
    done = run("explain", "scale", "--vendor", "ascent", path=[without("torch", "vllm")])
    assert (done.returncode, done.stdout) == (2, "")
    assert 'vllm-fl explain: --vendor: unknown vendor "ascent"; valid: ascend,' in done.stderr


def test_on_this_machine_the_answer_is_json_and_stands_alone() -> None:
    done = run("explain", "silu_and_mul", "--vendor", "ascend", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["device"]["device_class"] == "ascend:npu"


def test_every_op_that_ships_can_be_explained_for_every_vendor_with_its_guards() -> None:
    """Guards read metadata only, so that they answer about arguments that hold no data."""
    manager = OpManager(config=Config())
    manager.ensure_initialized()
    dtypes = {c.name: str(next(iter(c.tolerances))).partition(".")[2] for c in CONTRACTS}
    for vendor in ("cpu", "cuda", "metax", "xpu", "ascend"):
        for name in dtypes:
            data = explain(manager, name, vendor=vendor, dtype=dtypes[name])
            assert data["winner"] is not None
            assert data["asked"] == ("layer guards" if vendor == "ascend" else "all guards")


def test_for_another_device_its_own_shipped_policy_counts_and_is_left_behind_afterwards() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    here = manager.device
    data = explain(manager, "silu_and_mul", vendor="cuda")
    assert data["winner"]["impl_id"] == "vendor.cuda"
    (order,) = data["policy"].values()
    assert order["source"].startswith("shipped policy nvidia.yaml:")
    assert manager.device == here
    assert manager.policy_in_force.order_for("silu_and_mul", "eager") == ()


def test_why_several_layers_are_not_served_as_one_is_told() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    op = "fused_qk_norm_rope"
    policy = SelectionPolicy(per_op_order={"rms_norm": ["reference"]})
    data = explain(OpManager(manager.registry, config=Config(policy=policy)), op)
    assert data["winner"]["impl_id"] == "native"
    assert data["reason"] == "nothing takes the place of the layers: they run one by one"
    assert said(data)["reference.torch"].startswith("it is no faster than rms_norm and rotary_emb")
    for impl_id, reason in said(data).items():
        if impl_id == "vendor.cpu.fl" and "was not built" not in reason:
            assert reason.startswith("the policy has an order for rms_norm, which it fuses")
    h200 = explain(manager, op, vendor="cuda", mode="compiled")
    assert (h200["winner"]["impl_id"], h200["reason"]) == ("native", "left to the compiler")


# ------------------------------------------------------------- what is installed elsewhere


def asked_of(vendor: str, *more: str) -> list[str]:
    return ["explain", "rms_norm", "--vendor", vendor, *more, "--json"]


def test_an_ascend_runs_its_own_vendors_operators_and_flaggems_is_not_assumed(capfd) -> None:
    assert main(asked_of("ascend")) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["winner"]["impl_id"] == "vendor.ascend"
    reasons = said(told)
    assert reasons["default.flaggems"] == (
        "requires triton, flag_gems, sqlalchemy, not assumed to be installed there"
    )
    assert reasons["vendor.cpu"] == "runs on cpu, this device is npu"
    assert reasons["reference.torch"] == "priority 50 is below vendor.ascend's 100"
    known = {entry["impl_id"] for entry in told["registered"]}
    assert set(reasons) == known - {"vendor.ascend"}
    assert all(reasons.values())
    assert told["device"]["assumed_modules"] == ["torch", "torch_npu"]
    assert told["device"]["absent_modules"] == ["triton", "flag_gems", "sqlalchemy"]


def test_flaggems_can_be_assumed_with_all_that_it_requires(capfd) -> None:
    assert main(asked_of("ascend", "--with", "flag_gems")) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["winner"]["impl_id"] == "default.flaggems"
    assert said(told)["vendor.ascend"] == "priority 100 is below default.flaggems's 150"
    assert {"flag_gems", "triton", "torch_npu"} <= set(told["device"]["assumed_modules"])
    assert told["device"]["absent_modules"] == []


def test_without_its_own_vendors_stack_the_reference_is_left(capfd) -> None:
    assert main(asked_of("ascend", "--without", "torch_npu")) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["winner"]["impl_id"] == "reference.torch"
    assert said(told)["vendor.ascend"] == "requires torch_npu, not assumed to be installed there"


def test_what_this_machine_has_installed_says_nothing_about_another() -> None:
    """What FlagGems requires here is there: torch itself."""
    manager = samples.manager()
    here = type("Gems", (samples.Kernels,), {"requires": ("numpy",), "device_types": ("acme",)})()
    manager.registry.register_impl(samples.impls_of(here, "default.gems", 150)[0])
    data = explain(manager, "silu_and_mul", vendor="acme")
    assert data["winner"]["impl_id"] == "vendor.acme"
    assert said(data)["default.gems"] == "requires numpy, not assumed to be installed there"
    assert "not assumed to be installed there: numpy; --with assumes" in text_of(render, data)
    data = explain(manager, "silu_and_mul", vendor="acme", also=["numpy"])
    assert data["winner"]["impl_id"] == "default.gems"


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
def test_each_of_the_fourteen_vendors_is_explained_from_here(info) -> None:
    manager = OpManager(config=Config())
    manager.ensure_initialized()
    own = {"ascend": "vendor.ascend", "cuda": "vendor.cuda.fl", "rocm": "vendor.cuda.fl"}
    data = explain(manager, "rms_norm", vendor=info.name)
    assert data["winner"]["impl_id"] == own.get(info.name, "reference.torch")
    assert len(data["losers"]) == len(data["registered"]) - 1
    assert all(loser["reason"] for loser in data["losers"])
    if info.flaggems is None:
        assert "runs on" in said(data)["default.flaggems"]
        return
    assert "flag_gems" in data["device"]["absent_modules"]
    data = explain(manager, "rms_norm", vendor=info.name, also=["flag_gems"])
    measured = ("vendor.cuda",) if info.name == "cuda" else ()  # its shipped policy
    assert data["winner"]["impl_id"] in (*measured, "default.flaggems")


@pytest.mark.parametrize("option", ("also", "without"))
def test_a_module_that_nothing_there_requires_is_wrong_usage(option: str) -> None:
    said = (
        r"no implementation of rms_norm for acme requires the module 'acme_kernel', so it changes "
        r"nothing; valid: acme_kernels\. Did"
    )
    with pytest.raises(UsageError, match=said):
        explain(samples.manager(), "rms_norm", vendor="acme", **{option: ["acme_kernel"]})
    with pytest.raises(UsageError, match="add --vendor"):
        explain(samples.manager(), "rms_norm", **{option: ["acme_kernels"]})


def test_a_module_that_is_assumed_and_not_is_wrong_usage() -> None:
    with pytest.raises(UsageError) as caught:
        explain(
            samples.manager(), "rms_norm", vendor="acme",
            also=["acme_kernels"], without=["acme_kernels"],
        )  # fmt: skip
    assert str(caught.value) == (
        "--with acme_kernels and --without acme_kernels contradict each other; keep one of them"
    )


def test_an_op_that_flaggems_does_not_serve_is_told_where_flaggems_is_assumed(capfd) -> None:
    assert main(["explain", "gelu_new", "--vendor", "ascend", "--with", "flag_gems"]) == 2
    assert capfd.readouterr().err.startswith(
        "vllm-fl explain: no implementation of gelu_new for ascend:npu requires the module "
        "'flag_gems', so it changes nothing; valid: "
    )


@pytest.mark.parametrize(
    ("probe", "requires", "unsure"),
    [
        (lambda: "no rms_norm in gems 1", ("numpy",), "as it is installed here: no rms_norm in g"),
        (lambda: True, ("numpy",), ""),
        (
            lambda: True,
            ("no_such_gems",),
            "whether it has a kernel for silu_and_mul was not looked up, for want of no_such_gems",
        ),
        (lambda: 1 / 0, ("numpy",), "here, its availability probe raised ZeroDivisionError: "),
    ],
)
def test_a_kernel_that_the_assumed_library_may_lack_is_told(probe, requires, unsure: str) -> None:
    """A probe of one function, beside that of its backend, says whether the library has it."""
    manager = samples.manager()
    backend = type("Gems", (samples.Kernels,), {"requires": requires, "device_types": None})()
    impl = samples.impls_of(backend, "default.gems", 150)[0]
    manager.registry.register_impl(
        replace(impl, available=MethodType(lambda backend: probe(), backend))
    )
    data = explain(manager, "silu_and_mul", vendor="acme", also=requires)
    assert data["winner"]["impl_id"] == "default.gems"
    (found,) = [e["unsure"] for e in data["registered"] if e["impl_id"] == "default.gems"]
    assert found.startswith(unsure) and bool(found) == bool(unsure)
    assert (f"default.gems: {found}" in text_of(render, data)) == bool(unsure)
    here = explain(manager, "silu_and_mul")  # where it is asked itself
    assert {e["unsure"] for e in here["registered"]} == {""}
