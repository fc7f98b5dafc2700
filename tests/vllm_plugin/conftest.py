# SPDX-License-Identifier: Apache-2.0
"""Layers of the installed vLLM, built directly. Each test leaves vLLM as it found it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_fl.dispatch import get_default_manager, reset_default_manager
from vllm_fl.dispatch.log import logger
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.native import native_refusal
from vllm_fl.vllm_plugin import hooks, plugin
from vllm_fl.vllm_plugin.layers.serve import records
from vllm_fl.vllm_plugin.routes import route_rows


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> None:
    """Those of vLLM, but for tests that ask for `native`."""
    if "native" not in request.fixturenames:
        request.getfixturevalue("vllms_kernels_first")


@pytest.fixture
def native() -> None:
    """Our own kernels, which must have been built."""
    refusal = native_refusal("cpu")
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """No hook, no record, no default manager, neither before nor after."""
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    reset_default_manager()
    records.clear()
    assert hooks.installed() == ()
    yield
    plugin.unregister()
    left = [hook.name for hook in hooks.installed()]
    reset_default_manager()
    records.clear()
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate
    assert left == []


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """vLLM's registries of layers that other plugins replace."""
    from vllm.model_executor.custom_op import op_registry_oot

    before = dict(op_registry_oot)
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """register(PER_OP="rms_norm=native") registers the plugin under VLLM_FL_PER_OP=..."""

    def register(**settings: str) -> None:
        for name, value in {"LOG_LEVEL": "WARNING", **settings}.items():
            monkeypatch.setenv(f"VLLM_FL_{name}", value)
        reset_default_manager()
        plugin.register()

    return register


@pytest.fixture
def current_config() -> Callable[..., Any]:
    """A context in which vLLM's layers can be built: eager, unless other arguments of
    CompilationConfig are given."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # as a worker does, before it builds a layer

    def current_config(**compilation: Any) -> Any:
        config = CompilationConfig(**(compilation or {"mode": 0}))
        return set_current_vllm_config(VllmConfig(compilation_config=config))

    return current_config


@pytest.fixture
def build(current_config: Callable[..., Any]) -> Callable[..., Any]:
    """build(RMSNorm, 64) builds an eager layer, with weights that are not all one."""

    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        with current_config():
            layer = cls(*args, **kwargs)
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        return layer

    return build


@pytest.fixture
def both(build: Callable[..., Any], register: Callable[..., None]) -> Callable[..., Any]:
    """both(RMSNorm, 64) builds a layer of vLLM alone, then one with the plugin."""

    def both(cls: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        assert hooks.installed() == ()
        stock = build(cls, *args, **kwargs)
        register()
        return stock, build(cls, *args, **kwargs)

    return both


@pytest.fixture
def register_impl() -> Callable[..., OpImpl]:
    """Put a hand-made implementation for CPUs, above all others, into the default registry."""

    def register_impl(op_name: str, fn: Callable[..., Any], **changes: Any) -> OpImpl:
        impl = OpImpl(
            **{
                "op_name": op_name,
                "impl_id": "vendor.cpu.test",
                "kind": BackendImplKind.VENDOR,
                "fn": fn,
                "vendor": "cpu",
                "priority": 200,
                **changes,
            }
        )
        get_default_manager().registry.register_impl(impl)
        return impl

    return register_impl


@pytest.fixture
def rows() -> Callable[[], dict[str, Any]]:
    """The route table by op, where each op has one row."""

    def rows() -> dict[str, Any]:
        table = route_rows()
        by_op = {row["op"]: row for row in table}
        assert len(by_op) == len(table), table
        return by_op

    return rows


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What vllm_fl logs, as "LEVEL text"."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler = Keep()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
