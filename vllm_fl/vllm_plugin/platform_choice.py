# SPDX-License-Identifier: Apache-2.0
"""Whether vllm_fl offers vLLM a platform: only where vLLM has none that works.

vLLM asks while `import vllm` is still running, so no torch and next to nothing of vLLM is imported
here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..dispatch.config import load_config
from ..dispatch.log import configure_logging, logger
from ..dispatch.types import DeviceFacts

__all__ = ["GROUP", "PLATFORM", "choose", "describe", "has_extension", "offer"]

GROUP = "vllm.platform_plugins"
PLATFORM = "vllm_fl.vllm_plugin.platform.PlatformFL"

_SERVED_BY_VLLM = ("cuda", "rocm")
"""Vendors for whose device vLLM has a platform with kernels in its extension."""


def detect(vendor: str | None) -> DeviceFacts:
    """The device of this machine; switched off, vllm_fl does not even import the table."""
    from ..backends.vendor import devices

    return devices.detect(vendor)


def has_extension() -> bool:
    """Whether vLLM was installed with its compiled extension; nothing of it is imported."""
    from ..backends.vendor import vllm_extension

    return vllm_extension.has_extension()


def offer() -> str | None:
    """The entry point: the platform's path where vllm_fl steps in, else None."""
    path, reason = choose()
    if path is not None:
        _say(logger.info, f"vllm_fl's platform steps in: {reason}")
    return path


_said: set[str] = set()


def _say(log: Callable[..., None], text: str) -> None:
    """Log a line once: vLLM asks twice. It asks before the general plugin sets logging up."""
    if text not in _said:
        _said.add(text)
        configure_logging(load_config().log_level)
        log("%s", text)


def choose() -> tuple[str | None, str]:
    """The platform's path or None, and why.

    Raises:
        ConfigError: the configuration is wrong. vLLM swallows it here; the general plugin raises
            it again, where it is shown.
    """
    config = load_config()
    if not config.enabled:
        return None, "VLLM_FL_ENABLED=0"
    asked = config.platform
    device = detect(asked)
    if device.device_type == "cpu":
        return None, "the device is a CPU, which vLLM's own platform serves"
    extension = has_extension()
    if asked is None and device.vendor == "xpu":
        return None, "vLLM has a platform for xpu, whose kernels come with a package of their own"
    if asked is None and device.vendor in _SERVED_BY_VLLM and extension:
        return None, f"vLLM has a platform for {device.vendor}, and its compiled extension is here"
    rival = _other_plugin()
    if rival is not None:
        if asked is None:
            reason = f"the platform plugin '{rival}' is active"
            _say(logger.info, f"vllm_fl's platform stays back: {reason}")
            return None, reason
        _say(
            logger.warning,
            f"VLLM_FL_PLATFORM={asked} asks for vllm_fl's platform, and the platform plugin "
            f"'{rival}' is active too: vLLM refuses two. Set VLLM_PLUGINS to leave one out.",
        )
    if asked is not None:
        return PLATFORM, f"VLLM_FL_PLATFORM={asked}"
    if device.vendor in _SERVED_BY_VLLM:
        return PLATFORM, "this vLLM has no compiled extension"
    return PLATFORM, f"vLLM has no platform for {device.vendor}"


def describe() -> dict[str, Any]:
    """What `choose` says and what it looked at, JSON-ready.

    Returns:
        steps_in, reason, vendor (of this machine's device), extension (whether vLLM's is here),
        asked (VLLM_FL_PLATFORM), rival (another platform plugin that vLLM would load beside ours).

    Raises:
        ConfigError: as `choose`.
    """
    path, reason = choose()
    asked = load_config().platform
    return {
        "steps_in": path is not None,
        "reason": reason,
        "vendor": detect(asked).vendor if load_config().enabled else None,
        "extension": has_extension(),
        "asked": asked,
        "rival": None if path is None else _other_plugin(),
    }


def _allowed(name: str) -> bool:
    """Whether VLLM_PLUGINS lets vLLM load a plugin; unset lets it load all."""
    from vllm import envs  # imported by the time that vLLM asks

    listed = envs.VLLM_PLUGINS
    return listed is None or name in listed


def _other_plugin() -> str | None:
    """The name of another allowed platform plugin that offers a platform."""
    for point in entry_points(group=GROUP):
        if point.value.partition(":")[0] == __name__ or not _allowed(point.name):
            continue
        if _offers(point):
            return point.name
    return None


def _offers(point: EntryPoint) -> bool:
    try:
        return point.load()() is not None
    except Exception as error:
        logger.debug("the platform plugin '%s' failed: %r", point.name, error)
        return False
