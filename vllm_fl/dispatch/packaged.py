# SPDX-License-Identifier: Apache-2.0
"""Policies that packages bring for their devices, as files beside their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import load_config, shipped_policy
from .errors import ConfigError, RegistrationError
from .registry import OpRegistrySnapshot
from .types import DeviceFacts, Origin, PolicyFolder

__all__ = ["check_folder", "policy_files"]


def policy_files(device: DeviceFacts, snapshot: OpRegistrySnapshot) -> dict[str, Any]:
    """The policy files for a device, as `load_config` takes them: vllm_fl's own, and those that
    packages brought, which speak first."""
    found = [(shipped_policy(device, p.folder), _label(p.origin)) for p in snapshot.policies]
    return {
        "shipped": shipped_policy(device),
        "packaged": [(path, label) for path, label in found if path is not None],
    }


def check_folder(brought: PolicyFolder, snapshot: OpRegistrySnapshot) -> None:
    """Refuse a package's policies while it registers, so that they are its own failure and not
    the configuration's.

    Raises:
        RegistrationError: there are none, one is not right, or one orders what another package's
            orders for the same device.
    """
    who = _label(brought.origin)
    paths = sorted(brought.folder.glob("*.yaml"))
    if not paths:
        raise RegistrationError(
            f"{who}: {brought.folder} holds no *.yaml; name each file as the device or vendor that "
            "it is for, and let the package's build include it (package-data)"
        )
    for path in paths:
        ops = _orders(path, who, snapshot)
        for other in snapshot.policies:
            theirs = other.folder / path.name
            both = ops & _orders(theirs, _label(other.origin)) if theirs.is_file() else set()
            if both:
                raise RegistrationError(
                    f"{who}, {path.name}: {', '.join(sorted(both))} is ordered by the "
                    f"{_label(other.origin)} too; uninstall one of them"
                )


def _orders(path: Path, label: str, snapshot: OpRegistrySnapshot | None = None) -> set[str]:
    """The keys that a file orders, checked against what is registered."""
    try:
        config = load_config({}, packaged=[(path, label)])
        if snapshot is not None:
            config.check_against(snapshot)
    except ConfigError as error:
        raise RegistrationError(str(error)) from None
    return {key for key, _ in config.policy.per_op_order}


def _label(origin: Origin) -> str:
    return f"policy of {f'{origin.package} {origin.version}'.strip() or origin.name}"
