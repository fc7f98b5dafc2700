# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins: fl`. vLLM calls it in every process it starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..dispatch.config import ADDITIONAL_CONFIG, Config, check_names, variable_names
from ..dispatch.default import get_default_manager
from ..dispatch.log import logger
from . import hooks

if TYPE_CHECKING:
    from .layers import LayerSpec

FINGERPRINT = "VLLM_FL_DISPATCH_FINGERPRINT"
"""The name under which vLLM's `envs.compile_factors` finds the fingerprint."""

__all__ = ["check_layer_names", "register", "unregister"]


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

    check_layer_names(manager.config)
    if manager.config.platform is None and not manager.frozen:
        manager.set_device(platform_device(manager.known_vendors()))
    manager.ensure_initialized()
    _await_layers()
    _await_functions()
    hooks.when_imported("vllm.v1.worker.worker_base", _hook_worker)


def unregister() -> None:
    """Take every hook back. Layers that were built keep what they were bound to, and workers their
    three methods that vllm_fl wraps: to load a model, to warm up, to run a step."""
    from .functions.serve import release
    from .fusions.serve import release as release_modules

    release()
    release_modules()
    hooks.uninstall_all()


def _make_variables_known() -> None:
    """Let vLLM's validation of VLLM_* names pass.

    The values are constant on purpose: what vLLM reads here enters its compile-cache keys, and
    of vllm_fl's variables only their effect on the choice may.
    """
    from vllm import envs

    for name in variable_names():
        envs.environment_variables.setdefault(name, _no_factor)
    envs.environment_variables[FINGERPRINT] = _fingerprint


def _no_factor() -> None:
    return None


def _fingerprint() -> str:
    """What vllm_fl adds to vLLM's compile-cache keys.

    Without it, a change of policy, of a kernel's source or of the plugin itself would go on
    running what an earlier choice had compiled. It is there also when vllm_fl is switched off.
    """
    manager = get_default_manager()
    if not manager.config.enabled:
        return "off"
    from .layers.serve import choices

    return manager.fingerprint(extra=choices())


def check_layer_names(config: Config) -> None:
    """Refuse names in the OOT lists that no served layer, function or module has.

    Raises:
        ConfigError: naming the source, and the valid names.
    """
    from .functions import FUNCTIONS
    from .fusions.serve import NAMES
    from .layers import LAYERS

    valid = sorted({spec.name for spec in LAYERS} | {spec.op for spec in FUNCTIONS} | {*NAMES})
    for name in ("oot_whitelist", "oot_blacklist"):
        source = config.sources.get(name, name)
        check_names(config.values.get(name, ()), valid, what="layer", source=source)


def _await_layers() -> None:
    from .layers import LAYERS

    paths = (path for spec in LAYERS for path in spec.paths)
    for module_name in dict.fromkeys(path.partition(":")[0] for path in paths):
        hooks.when_imported(module_name, _hook_layers)


def _await_functions() -> None:
    from .functions import FUNCTIONS

    for module_name in dict.fromkeys(
        name for spec in FUNCTIONS for name in (spec.module_name, *spec.callers)
    ):
        hooks.when_imported(module_name, _hook_functions)


def _hook_functions(module: ModuleType) -> None:
    from .functions.serve import hook_module

    hook_module(module)


def _hook_layers(module: ModuleType) -> None:
    from .layers import LAYERS

    for spec in LAYERS:
        for path in spec.paths:
            module_name, _, class_name = path.partition(":")
            cls = getattr(module, class_name, None)
            if module_name != module.__name__ or not isinstance(cls, type):
                continue  # this release does not have it
            if not hasattr(cls, "dispatch_forward"):
                continue  # or not as one of its CustomOps
            owner = cls if spec.root is None else getattr(module, spec.root, cls)
            hooks.install(
                owner,
                "__init__",
                functools.partial(_serving, spec, cls, owner, path not in spec.functional),
                purpose=f"bind {spec.name} when it is built",
            )


def _serving(
    spec: LayerSpec, cls: type, owner: Any, donate: bool, original: Callable[..., None] | None
) -> Callable[..., None]:
    from .layers.serve import serve

    @functools.wraps(original or owner.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if original is None:  # it is inherited, in the instance's own order of classes
            super(owner, self).__init__(*args, **kwargs)
        else:
            original(self, *args, **kwargs)
        if spec.is_for(type(self)):
            serve(self, spec, cls, donate=donate)

    return __init__


def _hook_worker(worker_base: ModuleType) -> None:
    from .routes import RPC_NAME, rpc

    hooks.install(
        worker_base.WorkerBase,
        RPC_NAME,
        lambda _: rpc,
        purpose="answer for the route table over RPC",
    )
    hooks.install(
        worker_base.WorkerWrapperBase,
        "init_device",
        _around_init_device,
        purpose="read additional_config before the model is loaded; freeze and warm up after",
    )


def _around_init_device(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        _prepare(self.vllm_config)
        result = original(self, *args, **kwargs)
        from ..backends.vendor.devices import observed  # not where vllm_fl is switched off

        manager = get_default_manager()
        manager.set_device(observed(manager.device))  # it is initialised now
        compiles = _compiles(self.vllm_config)
        self.worker.load_model = _freezing(self.worker.load_model, compiles, self.worker)
        _warm_up_before(self.worker)
        return result

    return init_device


def _warm_up_before(worker: Any) -> None:
    """Let a worker warm up our kernels before its own; not all that is called a worker does."""
    original = getattr(worker, "compile_or_warm_up_model", None)
    if original is not None:
        from .warmup import warming

        worker.compile_or_warm_up_model = warming(worker, original)


def _prepare(vllm_config: Any) -> None:
    """Take over what travels with vLLM's configuration, before a worker builds a layer."""
    manager = get_default_manager()
    manager.thaw()  # a new model in this process is built from the present choice
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get("vllm_fl") if isinstance(additional, dict) else None
    sources = manager.config.sources.values()
    if given is not None or any(ADDITIONAL_CONFIG in source for source in sources):
        config = manager.read_config(given)  # without what an earlier model was given
        check_layer_names(config)
        manager.configure(config)


def _compiles(vllm_config: Any) -> bool:
    """Whether vLLM traces and compiles the model; graphs without that are not meant."""
    from .compile import COMPILED, mode_of

    return mode_of(vllm_config) == COMPILED


def _freezing(
    load_model: Callable[..., Any], compiled: bool = False, worker: Any = None
) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def load_and_freeze(*args: Any, **kwargs: Any) -> Any:
        from .functions import FUNCTIONS
        from .functions.serve import bind
        from .fusions.serve import bind as bind_modules
        from .layers.serve import settle
        from .routes import log_summary

        result = load_model(*args, **kwargs)
        settle()
        model = _model_of(worker)
        if model is not None:
            bind_modules(model, compiled=compiled)
        bind(FUNCTIONS, compiled=compiled)
        get_default_manager().freeze()
        _make_room(worker, compiled)
        log_summary()
        return result

    return load_and_freeze


def _make_room(worker: Any, compiled: bool) -> None:
    """Give a worker's steps room on Python's stack, where a graph calls our operators."""
    from .layers import serve
    from .stack import is_roomy, roomy

    execute = getattr(worker, "execute_model", None)
    opaque = any(served.entry is not None for record in serve.records for served in record.ops)
    if compiled and opaque and execute is not None and not is_roomy(execute):
        worker.execute_model = roomy(execute)


def _model_of(worker: Any) -> Any:
    """The model that a worker has loaded, or None where it does not tell."""
    try:
        return worker.get_model()
    except (AttributeError, NotImplementedError) as error:
        logger.debug("%s does not tell its model: %r", type(worker).__name__, error)
        return None
