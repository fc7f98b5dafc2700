# SPDX-License-Identifier: Apache-2.0
"""The questions that a child process is asked (`child.py`), and how it answers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..backends.vendor.devices import detect, observed
from ..backends.vendor.devices import survey as sightings
from ..dispatch.config import Config, load_config
from ..dispatch.discovery import discover
from ..dispatch.errors import ConfigError, DispatchError
from ..dispatch.log import configure_logging, logger
from ..dispatch.manager import OpManager
from ..dispatch.packaged import policy_files
from ..dispatch.registry import OpRegistry
from ..dispatch.types import OpImpl, Origin
from ..native import MODULES, find_refusal, initialised_gpu
from .errors import CommandError, UsageError

__all__ = ["Prepared", "prepare", "reply"]

Tell = Callable[..., None]
Skip = Sequence[Sequence[Any]]
"""[what was being done, how it ended the process], as JSON gives it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A manager after discovery, and what was wrong with the configuration.

    Attributes:
        manager: works under the defaults where the configuration is wrong.
        config_error: what is wrong with it, or None.
    """

    manager: OpManager
    config_error: str | None


def reply(given: dict[str, Any]) -> None:
    """Answer the parent's question through the pipe, and end."""
    pipe = given["pipe"]
    os.set_inheritable(pipe, False)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        data = json.dumps(message, default=str).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    def tell(*doing: str) -> None:
        send({"doing": doing})

    _log_to_stderr()
    code = 1
    try:
        message = {"answer": QUESTIONS[given["question"]](tell, **given["arguments"])}
        code = 0
    except (DispatchError, CommandError) as error:
        message = {"error": {"text": str(error), "usage": isinstance(error, UsageError)}}
    except BaseException as error:
        traceback.print_exc()
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error}{notes}"
        message = {"error": {"text": text, "usage": False}}
    send(message)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # what runs at exit may crash, too


def _end_with_parent(pipe: int) -> None:
    """End this process, and what it started, when nobody holds the pipe's other end any more: the
    parent may be killed without a chance to do it."""
    waiting = select.poll()
    waiting.register(pipe, 0)  # an error, which is told anyway, is that end's having been closed
    waiting.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _log_to_stderr() -> None:
    """Warnings and worse, and what the configuration asks for where it says so."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False


def prepare(tell: Tell, skip: Skip = ()) -> Prepared:
    """Configuration, discovery and device, each as far as it gets.

    Args:
        tell: is told of each plugin before it is loaded, and of each probe before it is asked.
        skip: what is left out, because it ended the process before.
    """
    config, problem = Config(), None
    try:
        config = load_config()
    except ConfigError as error:
        problem = str(error)
    if "log_level" in config.values:
        for handler in logger.handlers:
            handler.setLevel(config.log_level)
    configure_logging(config.log_level)
    registry = OpRegistry()

    def watch(origin: Origin) -> str | None:
        doing = ("plugin", origin.source, origin.name)
        reason = _reason(skip, doing)
        if reason is None:
            tell(*doing)
        return reason

    registry.plugins = discover(registry, config.plugin_modules, watch=watch)
    _replace_crashing_probes(registry, skip)
    try:
        device = detect(config.platform, registry.snapshot().known_vendors())
        if _reason(skip, ("device",)) is None:
            tell("device")
            device = observed(device)  # as in a worker: a shipped policy may be for the product
        if problem is None:
            config = load_config(**policy_files(device, registry.snapshot()))
            notes = [f"Note: {p.name} failed ({p.error})." for p in registry.plugins if not p.ok]
            config.check_against(registry.snapshot(), notes)
            _check_layer_names(config)
    except ConfigError as error:
        config, problem = Config(), problem or str(error)
        device = detect(None)
    for op, impls in registry.snapshot().impls_by_op.items():
        for impl in impls:
            tell("probe", op, impl.impl_id)
            impl.availability(device)
    tell("manager")
    # Left to read the configuration itself, it reads another device's shipped policy in a what-if.
    manager = OpManager(registry, config=config if problem else None, device=device)
    manager.ensure_initialized()
    return Prepared(manager, problem)


def _check_layer_names(config: Config) -> None:
    """As a process of vLLM does when it is patched. Without a torch that works nobody knows the
    names, and that is told elsewhere."""
    if not config.values.keys() & {"oot_whitelist", "oot_blacklist"}:
        return
    with contextlib.suppress(ImportError, OSError):
        from ..vllm_plugin.plugin import check_layer_names

        check_layer_names(config)


def _reason(skip: Skip, doing: Iterable[str]) -> str | None:
    return next((how for done, how in skip if list(done) == list(doing)), None)


def _replace_crashing_probes(registry: OpRegistry, skip: Skip) -> None:
    """Put refusals in the places of probes that ended the process."""
    for (kind, *names), how in skip:
        if kind != "probe":
            continue
        impl = registry.get_implementation(*names)
        if impl is not None and impl.origin is not None:
            registry.unregister(*names)
            with registry.batch(impl.origin):
                registry.register_impl(_without_probe(impl, f"its availability probe: {how}"))


def _without_probe(impl: OpImpl, reason: str) -> OpImpl:
    @functools.wraps(impl.fn)
    def fn(*args: Any, **kwargs: Any) -> Any:
        return impl.fn(*args, **kwargs)

    return replace(impl, fn=fn, available=lambda: reason)


def _registry(tell: Tell, skip: Skip = ()) -> dict[str, Any]:
    from .inventory import inventory

    prepared = prepare(tell, skip)
    return {
        **inventory(prepared.manager),
        "config_error": prepared.config_error,
        "sightings": [
            {"vendor": sighting.vendor, "found": sighting.found, "text": str(sighting)}
            for sighting in sightings()
        ],
    }


def _explain(tell: Tell, skip: Skip = (), **asked: Any) -> dict[str, Any]:
    from .explain import explain

    prepared = prepare(tell, skip)
    if prepared.config_error is not None:
        raise CommandError(prepared.config_error)
    return explain(prepared.manager, **asked)


def _bench(tell: Tell, skip: Skip = (), **asked: Any) -> dict[str, Any]:
    from .bench import bench

    prepared = prepare(tell, skip)
    if prepared.config_error is not None:
        raise CommandError(prepared.config_error)
    crashed = {doing[1]: how for doing, how in skip if doing[0] == "impl"}
    return bench(prepared.manager, **asked, crashed=crashed, tell=tell)


def _import(tell: Tell, skip: Skip = (), module: str = "") -> dict[str, Any]:
    found = importlib.import_module(module)
    return {"version": str(getattr(found, "__version__", ""))}


def _kernels(tell: Tell, skip: Skip = (), device: str = "cpu") -> dict[str, Any]:
    """Whether native kernels load, and what of them this machine uses."""
    torch = importlib.import_module("torch")
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.init()  # so that the GPU's architecture is known
    refusal = find_refusal(device)
    module = importlib.import_module(MODULES[device])
    if device == "cpu":
        uses = f"with {module.cpu_capability()}"
    else:
        uses = f"on {initialised_gpu() or 'no GPU, because there is none'}"
    return {"refusal": None if refusal is None else asdict(refusal), "uses": uses}


def _hooks(tell: Tell, skip: Skip = ()) -> dict[str, Any]:
    """What the plugin does in a process of vLLM: it is registered here as vLLM does it."""
    from ..dispatch.default import get_default_manager
    from ..vllm_plugin import hooks, plugin
    from ..vllm_plugin.fusions.serve import HOOKED

    plugin.register()
    manager = get_default_manager()
    import vllm

    return {
        "vllm": str(vllm.__version__),
        "enabled": manager.config.enabled,
        "device": manager.device.device_class if manager.config.enabled else None,
        "installed": [
            {"name": hook.name, "purpose": hook.purpose, "in_place": hook.in_place}
            for hook in hooks.installed()
        ],
        "awaited": list(hooks.awaited()),
        "platform": _active_platform(),
        "with_a_model": [
            {"name": name, "purpose": purpose}
            for name, purpose in (HOOKED if manager.config.enabled else ())
        ],
    }


def _platform(tell: Tell, skip: Skip = ()) -> dict[str, Any]:
    """Whether vllm_fl offers vLLM a platform here; vLLM is not imported for that, unless another
    platform plugin does."""
    from ..vllm_plugin import platform_choice

    return platform_choice.describe()


def _active_platform() -> dict[str, Any]:
    """The platform that vLLM chose, and the stand-ins for its extension."""
    from vllm.platforms import current_platform

    from ..vllm_plugin import shims
    from ..vllm_plugin.platform_choice import PLATFORM

    kind = type(current_platform)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == PLATFORM:
        current_platform.import_kernels()  # as a process with a model does
    return {"active": name, "shims": shims.survey(name, ours=name == PLATFORM)}


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "registry": _registry,
    "explain": _explain,
    "bench": _bench,
    "import": _import,
    "kernels": _kernels,
    "hooks": _hooks,
    "platform": _platform,
}
