# SPDX-License-Identifier: Apache-2.0
"""The FlagGems backend: available without an import, imported in the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

from ...dispatch.default import get_default_manager
from ...dispatch.log import logger
from ...dispatch.types import BackendImplKind
from ..base import Backend
from ..vendor import devices
from . import versions

__all__ = ["GEMS_VENDORS", "FlagGemsBackend", "backend"]

F = TypeVar("F", bound=Callable[..., Any])

GEMS_VENDORS = {info.name: info.flaggems for info in devices.VENDORS if info.flaggems is not None}
"""Our vendors to FlagGems' names of theirs; who is not here it has no kernels for."""

_DEVICE_TYPES = {info.device_type for info in devices.VENDORS if info.name in GEMS_VENDORS}


class FlagGemsBackend(Backend):
    """Takes single kernels out of FlagGems; its process-wide `enable()` is never called."""

    impl_id = "default.flaggems"
    kind = BackendImplKind.DEFAULT
    device_types = tuple(sorted(_DEVICE_TYPES))
    vendors = tuple(GEMS_VENDORS)
    requires = ("torch", "triton", "flag_gems", "sqlalchemy")
    compiles_at_first_call = True

    def __init__(self) -> None:
        super().__init__()
        self.kernels = SimpleNamespace()
        self._symbols: dict[str, None] = {}

    def is_available(self) -> bool | str:
        """Whether versions fit and a device of a vendor that FlagGems knows is here."""
        refusal = versions.reason(versions.flaggems_version(), versions.triton_version())
        if refusal is not None:
            return refusal
        vendor = self.device_vendor()
        if vendor not in GEMS_VENDORS:
            return f"flag_gems has no kernels for the vendor '{vendor}'"
        # FlagGems' import asks the device for its name: without one it raises.
        if devices.detect(None).vendor == "cpu" and not _counts_devices(vendor):
            return f"no device of the vendor '{vendor}' is here"
        return True

    def note(self) -> str:
        """That it runs with a shim, where it does."""
        from . import shim

        triton = versions.triton_version()
        if triton is None or versions.reason(versions.flaggems_version(), triton) is not None:
            return ""
        return f"on Triton {triton} with a shim: {shim.WHAT}" if versions.needs_shim(triton) else ""

    def device_vendor(self) -> str:
        """The vendor of this process's device, by our own name."""
        return get_default_manager().device.vendor

    def exports(self, symbols: tuple[str, ...]) -> bool | str:
        """Whether the installed FlagGems has the kernels, told from its source."""
        missing = [name for name in symbols if not versions.defines(name)]
        if not missing:
            return True
        return f"no {', '.join(missing)} in flag_gems {versions.flaggems_version()}"

    def implements(
        self,
        op_name: str | None = None,
        *,
        symbols: tuple[str, ...] = (),
        supports_layer: Callable[[Mapping[str, Any]], Any] | None = None,
        supports: Callable[..., Any] | None = None,
        mutates: tuple[str, ...] = (),
        batch_invariant: bool = False,
    ) -> Callable[[F], F]:
        """Mark a function, and say which of FlagGems' functions it calls.

        Args:
            symbols: names in FlagGems, found as attributes of `kernels` once it is loaded.
        """
        mark = super().implements(
            op_name,
            supports_layer=supports_layer,
            supports=supports,
            mutates=mutates,
            batch_invariant=batch_invariant,
        )

        def mark_with_symbols(fn: F) -> F:
            mark(fn)
            probe = MethodType(lambda backend: backend.exports(symbols), self)
            self._implementations[-1] = replace(self._implementations[-1], available=probe)
            self._symbols.update(dict.fromkeys(symbols))
            return fn

        return mark_with_symbols

    def load(self) -> None:
        """Import FlagGems and look up the kernels; see `loading` for what that changes."""
        from . import loading, shim

        modules = loading.import_flaggems(GEMS_VENDORS[self.device_vendor()])
        triton = versions.triton_version()
        if triton is not None and versions.needs_shim(triton):
            shim.apply()
            logger.info("flag_gems runs on Triton %s with a shim: %s", triton, shim.WHAT)
        for name in self._symbols:
            found = next((m for m in modules if hasattr(m, name)), None)
            if found is not None:  # else its op is unavailable, see `exports`
                setattr(self.kernels, name, getattr(found, name))


def _counts_devices(vendor: str) -> bool:
    """Whether PyTorch counts devices where no marker is seen, as in some containers. For CUDA
    it asks NVML, which initialises nothing."""
    import torch

    kind = devices.facts_of(vendor).device_type
    count = getattr(getattr(torch, kind, None), "device_count", None)
    return count is not None and count() > 0


backend = FlagGemsBackend()
