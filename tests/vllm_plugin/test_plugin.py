# SPDX-License-Identifier: Apache-2.0
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from vllm_fl.dispatch import ConfigError, SelectionPolicy, get_default_manager
from vllm_fl.dispatch.config import load_config, variable_names
from vllm_fl.vllm_plugin import hooks, plugin
from vllm_fl.vllm_plugin.functions import FUNCTIONS
from vllm_fl.vllm_plugin.fusions.serve import NAMES
from vllm_fl.vllm_plugin.layers import LAYERS
from vllm_fl.vllm_plugin.layers.serve import records

SERVED = {
    "vllm.model_executor.hw_agnostic.layers.activation": ["SiluAndMul"],
    "vllm.model_executor.hw_agnostic.layers.layernorm": ["RMSNorm"],
    "vllm.model_executor.layers.activation": [
        "FastGELU",
        "FatreluAndMul",
        "GeluAndMul",
        "MulAndSilu",
        "NewGELU",
        "QuickGELU",
        "ReLUSquaredActivation",
        "SiluAndMul",
        "SiluAndMulWithClamp",
        "SwigluOAIAndMul",
    ],
    "vllm.model_executor.layers.layernorm": [
        "GemmaRMSNorm",
        "LayerNorm",
        "RMSNorm",
        "RMSNormGated",
    ],
    "vllm.model_executor.layers.rotary_embedding.base": ["RotaryEmbeddingBase"],
    "vllm.model_executor.layers.rotary_embedding.mrope": ["MRotaryEmbedding"],
}
"""The classes whose constructors are hooked."""
VALID = ", ".join(
    sorted({spec.name for spec in LAYERS} | {spec.op for spec in FUNCTIONS} | {*NAMES})
)
"""What the OOT lists may name."""


def classes() -> list[type]:
    """Everything that the plugin could hook, imported."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    served = [
        getattr(importlib.import_module(module), name)
        for module, names in SERVED.items()
        for name in names
    ]
    return [*served, RotaryEmbedding, WorkerBase, WorkerWrapperBase]


def expected_hooks() -> list[str]:
    """What is hooked in this release: before 0.32 LayerNorm was a plain module."""
    from vllm.model_executor.layers.layernorm import LayerNorm

    served = [
        f"{module}.{name}.__init__"
        for module, names in SERVED.items()
        for name in names
        if name != "LayerNorm" or hasattr(LayerNorm, "dispatch_forward")
    ]
    return [
        *served,
        "vllm.v1.worker.worker_base.WorkerBase.vllm_fl_dispatch",
        "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
    ]


def state_of_vllm() -> dict[str, Any]:
    """vLLM's registries, and every attribute of the classes."""
    from vllm.model_executor import custom_op
    from vllm.model_executor.hw_agnostic import custom_op as agnostic

    state: dict[str, Any] = {f"{c.__module__}.{c.__name__}": dict(vars(c)) for c in classes()}
    for module in (custom_op, agnostic):
        for name in ("op_registry", "op_registry_oot"):
            state[f"{module.__name__}.{name}"] = dict(getattr(module, name))
    return state


def test_everything_that_is_hooked_is_listed_with_its_purpose(register) -> None:
    classes()
    register()
    assert sorted(hook.name for hook in hooks.installed()) == expected_hooks()
    assert all(hook.in_place and hook.purpose for hook in hooks.installed())


def test_registering_twice_changes_nothing(register) -> None:
    classes()
    register()
    state, listed = state_of_vllm(), hooks.installed()
    manager = get_default_manager()
    implementations = manager.registry.snapshot().impls_by_op
    plugin.register()
    assert state_of_vllm() == state
    assert hooks.installed() == listed
    assert get_default_manager() is manager
    assert manager.registry.snapshot().impls_by_op == implementations


def test_unregistering_restores_vllm(register) -> None:
    before = state_of_vllm()
    register()
    assert state_of_vllm() != before
    plugin.unregister()
    assert state_of_vllm() == before


def test_registering_changes_no_registry_and_nothing_but_what_is_listed(register) -> None:
    before = state_of_vllm()
    register()
    after = state_of_vllm()
    changed = {
        f"{owner}.{name}"
        for owner, attributes in after.items()
        for name, value in attributes.items()
        if before[owner].get(name) is not value
    }
    assert sorted(changed) == expected_hooks()


def test_switched_off_it_leaves_every_class_registry_and_method_as_it_is(register) -> None:
    before = state_of_vllm()
    register(ENABLED="0")
    assert state_of_vllm() == before
    assert (hooks.installed(), hooks.awaited()) == ((), ())


def test_switched_off_a_layer_is_built_as_vllm_builds_it(register, build) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    register(ENABLED="0")
    layer = build(RMSNorm, 64)
    assert layer._forward_method == layer.forward_cpu
    assert records == []


def validate_environ() -> None:
    """vLLM's check for --fail-on-environ-validation, where this release has it."""
    from vllm import envs
    from vllm.platforms.interface import Platform

    owner = Platform if hasattr(Platform, "validate_environ") else envs
    owner.validate_environ(hard_fail=True)


def test_vllm_knows_the_names_of_all_variables(register, monkeypatch) -> None:
    from vllm import envs

    for name in variable_names():
        monkeypatch.setitem(envs.environment_variables, name, lambda: None)
        monkeypatch.delitem(envs.environment_variables, name)
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    with pytest.raises(ValueError, match="Unknown vLLM environment variable"):
        validate_environ()
    register()
    assert set(variable_names()) <= set(envs.environment_variables)
    validate_environ()


def test_vllm_knows_the_names_when_it_is_switched_off_too(register) -> None:
    register(ENABLED="0", STRICT="1")
    validate_environ()


def test_no_value_of_a_variable_enters_vllms_compile_cache_keys(register, monkeypatch) -> None:
    from vllm import envs

    register()
    without = envs.compile_factors()
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert envs.compile_factors() == without


def test_an_unknown_variable_is_an_error_that_names_the_nearest(register) -> None:
    with pytest.raises(ConfigError) as error:
        register(PERFER="vendor")
    assert 'environment variable VLLM_FL_PERFER="vendor"' in str(error.value)
    assert 'Did you mean "VLLM_FL_PREFER"?' in str(error.value)


@pytest.mark.parametrize("which", ["WHITELIST", "BLACKLIST"])
def test_an_unknown_layer_in_an_oot_list_is_an_error_that_names_the_valid_ones(
    register, which: str
) -> None:
    with pytest.raises(ConfigError) as error:
        register(**{f"OOT_{which}": "rms_norm,silu_and_mull"})
    assert str(error.value) == (
        f'environment variable VLLM_FL_OOT_{which}: unknown layer "silu_and_mull"; valid: '
        f'{VALID}. Did you mean "silu_and_mul"?'
    )
    assert (hooks.installed(), hooks.awaited()) == ((), ())


def test_an_unknown_op_in_an_order_is_an_error_before_anything_is_hooked(register) -> None:
    with pytest.raises(ConfigError, match=r'unknown op "rms_nrom".*Did you mean "rms_norm"'):
        register(PER_OP="rms_nrom=native")
    assert (hooks.installed(), hooks.awaited()) == ((), ())


def test_the_device_is_the_one_of_the_platform_that_vllm_chose(register) -> None:
    register()
    assert get_default_manager().device.device_class == "cpu"


def test_the_device_can_be_given(register) -> None:
    register(PLATFORM="ascend")
    assert get_default_manager().device.vendor == "ascend"


# ------------------------------------------------------------------ in a process of its own


def test_registering_takes_little_and_imports_no_layer_and_no_kernel_library(tmp_path) -> None:
    (tmp_path / "flag_gems.py").touch()  # there to be imported
    (tmp_path / "torch_npu.py").touch()
    program = """
import json, sys, time, torch, vllm
before, seconds, used = set(sys.modules), time.perf_counter(), time.process_time()
from vllm_fl.vllm_plugin.plugin import register
register()
found = {"seconds": time.perf_counter() - seconds, "cpu": time.process_time() - used}
found["cuda"] = torch.cuda.is_initialized()
found["imported"] = [name for name in set(sys.modules) - before if name.startswith(
    ("flag_gems", "torch_npu", "triton", "vllm.model_executor", "vllm.v1.worker"))]
from vllm.model_executor.layers.layernorm import RMSNorm
found["hooked"] = hasattr(RMSNorm.__init__, "__wrapped__")
print(json.dumps(found))
"""
    # The first of two writes the bytecode, as every install does once.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**kept, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"register() took {found['seconds']:.3f} s, {found['cpu']:.3f} s of CPU time")
    # Measured: 0.07 s of CPU time, half of it to import the dispatch core. Wall-clock time says
    # more about the machine's other work.
    assert found["cpu"] < 0.2
    assert found["imported"] == []
    assert not found["cuda"]
    assert found["hooked"]


# -------------------------------------------------------------------------------- the worker


class Worker:
    """As much of a worker as its wrapper needs."""

    rank = 0

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self.frozen_in_init: bool | None = None
        self.model: Any = None

    def init_device(self) -> None:
        self.frozen_in_init = get_default_manager().frozen

    def load_model(self, **kwargs: Any) -> str:
        self.model = self._load()
        return f"loaded {kwargs}"


@pytest.fixture
def start(build) -> Callable[..., Any]:
    """start(additional_config) brings a worker to where its model is loaded."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def start(
        additional: Any = None, load: Callable[[], Any] = lambda: build(RMSNorm, 64)
    ) -> Worker:
        wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
        config = VllmConfig(compilation_config=CompilationConfig(mode=0))
        config.additional_config = {} if additional is None else additional
        wrapper.vllm_config = config
        wrapper.worker = Worker(load)
        wrapper.init_device()
        assert wrapper.load_model(dummy=True) == "loaded {'dummy': True}"
        return wrapper.worker

    return start


def served_by(layer: Any) -> dict[str, str | None]:
    record = next(record for record in records if record.layer() is layer)
    return {
        op.op: op.binding.decision.winner_id if op.binding is not None else None
        for op in record.ops
    }


def test_loading_the_model_freezes_the_choice_and_logs_one_line(register, start, log) -> None:
    register(LOG_LEVEL="INFO")
    log.clear()
    assert not get_default_manager().frozen
    worker = start()
    assert worker.frozen_in_init is False
    assert get_default_manager().frozen
    assert log == [
        "INFO model loaded: fused_add_rms_norm -> vendor.cpu x1, rms_norm -> vendor.cpu x1"
    ]


def test_a_layer_that_changed_while_the_model_was_loaded_is_decided_again(
    register, start, build, rows
) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    def load() -> Any:
        layer = build(RMSNorm, 64)
        layer.variance_size_override = 32
        return layer

    register()
    worker = start(load=load)
    assert served_by(worker.model)["rms_norm"] == "reference.torch"
    assert rows()["rms_norm"]["rejected"][0]["reason"] == "variance_size 32 is given"


def test_a_model_without_a_known_layer_is_logged_too(register, start, log) -> None:
    register(LOG_LEVEL="INFO")
    start(load=lambda: None)
    assert log[-1] == "INFO model loaded: no layer that vllm_fl knows"


def test_a_model_that_fails_to_load_freezes_nothing(register, start) -> None:
    register()

    def fail() -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        start(load=fail)
    assert not get_default_manager().frozen


def test_a_second_worker_in_the_same_process_thaws_first(register, start) -> None:
    register()
    first = start()
    assert get_default_manager().frozen
    second = start({"vllm_fl": {"op_backends": {"rms_norm": ["reference"]}}})
    assert second.frozen_in_init is False
    assert get_default_manager().frozen
    assert served_by(first.model)["rms_norm"] == "vendor.cpu"
    assert served_by(second.model)["rms_norm"] == "reference.torch"


def test_what_vllm_passes_on_is_applied_before_the_model_is_built(register, start, rows) -> None:
    register()
    worker = start({"vllm_fl": {"prefer": "reference", "oot_blacklist": ["silu_and_mul"]}})
    assert served_by(worker.model)["rms_norm"] == "reference.torch"
    assert rows()["rms_norm"]["reason"] == (
        "prefer = reference (from --additional-config vllm_fl.prefer)"
    )
    assert not get_default_manager().config.serves_layer("silu_and_mul")


def test_the_environment_outranks_what_vllm_passes_on(register, start) -> None:
    register(PREFER="vendor")
    worker = start({"vllm_fl": {"prefer": "reference"}})
    assert served_by(worker.model)["rms_norm"] == "vendor.cpu"


def test_what_one_model_was_given_does_not_reach_the_next(register, start) -> None:
    register()
    start({"vllm_fl": {"prefer": "reference"}})
    assert served_by(start().model)["rms_norm"] == "vendor.cpu"


def test_a_configuration_made_by_hand_stays_when_vllm_passes_nothing_on(register, start) -> None:
    register()
    given = load_config({"VLLM_FL_PREFER": "reference"})
    get_default_manager().configure(given)
    worker = start()
    assert get_default_manager().config is given
    assert served_by(worker.model)["rms_norm"] == "reference.torch"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"perfer": "vendor"},
            '--additional-config vllm_fl.perfer: unknown key "perfer"; valid: prefer, strict, '
            "op_backends, allow_vendors, deny_vendors, oot_blacklist, flagos_blacklist. "
            'Did you mean "prefer"?',
        ),
        (
            {"oot_blacklist": ["rmsnorm"]},
            '--additional-config vllm_fl.oot_blacklist: unknown layer "rmsnorm"; valid: '
            f'{VALID}. Did you mean "rms_norm"?',
        ),
        ("prefer", "--additional-config vllm_fl: must be a mapping, found 'prefer' of type str"),
    ],
)
def test_a_mistake_in_it_is_an_error_that_names_the_option(register, start, given, text) -> None:
    register()
    with pytest.raises(ConfigError) as error:
        start({"vllm_fl": given})
    assert str(error.value) == text
    assert get_default_manager().base_policy == SelectionPolicy()


def test_the_configuration_of_other_plugins_is_none_of_ours(register, start) -> None:
    register()
    start({"other": {"prefer": "nonsense"}})
    start(types.SimpleNamespace(compute_hash=lambda: "x"))


def test_the_names_of_layers_are_unique_and_each_has_a_class_in_this_vllm() -> None:
    assert len({spec.name for spec in LAYERS}) == len(LAYERS)
    for spec in LAYERS:
        module_name, _, class_name = spec.paths[0].partition(":")
        __import__(module_name)
        assert isinstance(getattr(sys.modules[module_name], class_name), type)
