# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins: fl`. vLLM calls it in every process it starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..dispatch.config import Config, check_names, load_config, variable_names
from ..dispatch.manager import get_default_manager
from . import hooks

__all__ = ["register", "unregister"]


def register() -> None:
    """Put vllm_fl to work in this process. Calling it again changes nothing.

    Raises:
        ConfigError: the configuration is wrong; vLLM then does not start, and says why.
    """
    _make_variables_known()
    manager = get_default_manager()
    if not manager.config.enabled:
        return
    from .features import platform_device
    from .layers import LAYERS

    _check_layer_names(manager.config, [spec.name for spec in LAYERS])
    if manager.config.platform is None and not manager.frozen:
        manager.set_device(platform_device())
    manager.ensure_initialized()
    _hook_layers()
    _hook_worker()


def unregister() -> None:
    """Take every hook back. Layers that were built keep what they were bound to."""
    hooks.uninstall_all()


def _make_variables_known() -> None:
    """Let vLLM's validation of VLLM_* names pass.

    The values are constant on purpose: what vLLM reads here enters its compile-cache keys, and
    of vllm_fl's variables only their effect on the choice may.
    """
    from vllm import envs

    for name in variable_names():
        envs.environment_variables.setdefault(name, _no_factor)


def _no_factor() -> None:
    return None


def _check_layer_names(config: Config, valid: list[str]) -> None:
    for name in ("oot_whitelist", "oot_blacklist"):
        source = config.sources.get(name, name)
        check_names(config.values.get(name, ()), valid, what="layer", source=source)


def _hook_layers() -> None:
    from .features import find_class
    from .layers import LAYERS
    from .layers.serve import serve

    for spec in LAYERS:
        for path in spec.paths:
            cls = find_class(path)
            if cls is None:
                continue

            def make(original: Any, spec: Any = spec, cls: type = cls) -> Callable[..., None]:
                @functools.wraps(original)
                def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                    original(self, *args, **kwargs)
                    serve(self, spec, cls)

                return __init__

            hooks.install(cls, "__init__", make, purpose=f"bind {spec.name} when it is built")


def _hook_worker() -> None:
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    from .routes import RPC_NAME, rpc

    hooks.install(
        WorkerBase, RPC_NAME, lambda _: rpc, purpose="answer for the route table over RPC"
    )
    hooks.install(
        WorkerWrapperBase,
        "init_device",
        _around_init_device,
        purpose="read additional_config before, and freeze after, the model is loaded",
    )


def _around_init_device(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        _prepare(self.vllm_config)
        result = original(self, *args, **kwargs)
        self.worker.load_model = _freezing(self.worker.load_model)
        return result

    return init_device


def _prepare(vllm_config: Any) -> None:
    """Take over what travels with vLLM's configuration, before a worker builds a layer."""
    manager = get_default_manager()
    manager.thaw()  # a new model in this process is built from the present choice
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get("vllm_fl") if isinstance(additional, dict) else None
    if given is not None:
        from .layers import LAYERS

        config = load_config(additional=given)
        _check_layer_names(config, [spec.name for spec in LAYERS])
        manager.configure(config)


def _freezing(load_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def load_and_freeze(*args: Any, **kwargs: Any) -> Any:
        from .routes import log_summary

        result = load_model(*args, **kwargs)
        get_default_manager().freeze()
        log_summary()
        return result

    return load_and_freeze
