# SPDX-License-Identifier: Apache-2.0
"""What is checked: an implementation, its contract, and a dispatcher that holds just the two."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backends.vendor.devices import VENDORS
from ..dispatch import OpManager, OpRegistry
from ..dispatch.config import Config
from ..dispatch.types import BackendImplKind, DeviceFacts, OpImpl
from ..ops.contract import OpContract

__all__ = ["Dispatcher", "Target", "device_facts"]

NEXT = "reference.next"


@dataclass(frozen=True, slots=True)
class Target:
    """An implementation and the contract that it is held to."""

    contract: OpContract
    impl: OpImpl


def device_facts(device: str, impl: OpImpl) -> DeviceFacts:
    """The facts of a device as torch names it, e.g. "cuda:0"; of several vendors with such
    devices, the implementation's own."""
    kind = device.partition(":")[0]
    vendors = [v.name for v in VENDORS if v.device_type == kind]
    if impl.vendor is not None and (impl.vendor in vendors or not vendors):
        return DeviceFacts(impl.vendor, kind)
    return DeviceFacts(vendors[0] if vendors else kind, kind)


class Dispatcher:
    """The real dispatcher with two implementations: the one under test, first, and behind it the
    contract's reference, which notes that it was reached.

    Raises:
        RegistrationError: the registry refuses the implementation.
    """

    def __init__(self, target: Target, device: DeviceFacts) -> None:
        self.reached_next = 0
        contract, impl = target.contract, target.impl

        @functools.wraps(contract.reference)
        def reference(*args: Any, **kwargs: Any) -> Any:
            self.reached_next += 1
            return contract.reference(*args, **kwargs)

        behind = OpImpl(
            op_name=impl.op_name,
            impl_id=NEXT,
            kind=BackendImplKind.REFERENCE,
            fn=reference,
            priority=impl.priority - 1,
        )
        registry = OpRegistry()
        registry.plugins = ()  # nothing is to be discovered
        registry.declare(contract.signature)
        registry.register_many([replace(impl, origin=None), behind])
        self.manager = OpManager(
            registry, config=Config(values={"log_level": "ERROR"}), device=device
        )

    def call(self, op_name: str, args: tuple[Any, ...]) -> tuple[Any, bool]:
        """The result, and whether the next implementation gave it."""
        before = self.reached_next
        result = self.manager.call(op_name, *args)
        return result, self.reached_next > before


def facts_of(target: Target, args: tuple[Any, ...]) -> Mapping[str, Any]:
    """The facts that the layer guard gets for a call."""
    return target.contract.signature.facts_of(*args)
