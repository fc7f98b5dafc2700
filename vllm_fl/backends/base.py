# SPDX-License-Identifier: Apache-2.0
"""Backend: what a set of implementations has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from ..dispatch.errors import RegistrationError
from ..dispatch.types import (
    API_VERSION,
    Accepted,
    BackendImplKind,
    BackendPriority,
    OpImpl,
    Rejected,
)

__all__ = ["Backend"]

F = TypeVar("F", bound=Callable[..., Any])

_PRIORITY = {
    BackendImplKind.DEFAULT: BackendPriority.DEFAULT,
    BackendImplKind.VENDOR: BackendPriority.VENDOR,
    BackendImplKind.REFERENCE: BackendPriority.REFERENCE,
}


class Backend:
    """Subclass it, set the class attributes, and mark each function with `implements`.

    The dispatcher asks, in this order and each only if the one before agreed:
    `device_types`, `requires`, `is_available()`; then, when one of its ops is first bound,
    `load()`.

    Attributes:
        impl_id: the id its implementations carry, e.g. "vendor.acme".
        kind: DEFAULT, VENDOR or REFERENCE.
        vendor: the vendor's name for kind VENDOR.
        device_types: PyTorch device types it runs on; None for any.
        vendors: of the vendors whose chips have such a type, those on whose chips it runs; None
            for all of them. Eight vendors' device type is "cuda".
        requires: top-level modules that must be installed; looked up, never imported.
        priority: of its implementations; None takes the kind's.
        compiles_at_first_call: its kernels are compiled when they are first called with arguments
            of a kind, as Triton's are. Then the worker calls them before the first request.
        graph_operators: which operator of its own a compiled graph may call in place of
            `torch.ops.vllm_fl.<op>`, by the name of that, such as "rms_norm" or, for the form that
            writes its arguments, "fused_add_rms_norm_". See `set_direct`.
        api_version: the version of this interface that it was written for. A package of its own
            says it as a number, so that a later vllm_fl can tell an old package.
    """

    impl_id: ClassVar[str]
    kind: ClassVar[BackendImplKind] = BackendImplKind.VENDOR
    vendor: ClassVar[str | None] = None
    device_types: ClassVar[tuple[str, ...] | None] = None
    vendors: ClassVar[tuple[str, ...] | None] = None
    requires: ClassVar[tuple[str, ...]] = ()
    priority: ClassVar[int | None] = None
    compiles_at_first_call: ClassVar[bool] = False
    graph_operators: ClassVar[Mapping[str, str]] = {}
    api_version: ClassVar[int] = API_VERSION

    def __init_subclass__(cls) -> None:
        for name in ("device_types", "vendors", "requires"):
            if isinstance(getattr(cls, name), str):
                raise RegistrationError(
                    f"{cls.__name__}.{name} must be a tuple of names, found the string "
                    f"{getattr(cls, name)!r}; write ({getattr(cls, name)!r},)"
                )
        if dotted := [name for name in cls.requires if "." in name]:
            raise RegistrationError(
                f"{cls.__name__}.requires must name top-level modules, found {dotted[0]!r}: to "
                f"look for it would import {dotted[0].partition('.')[0]}; name that, and ask for "
                "the rest in is_available()"
            )

    def __init__(self) -> None:
        self._implementations: list[OpImpl] = []

    def is_available(self) -> bool | str | Accepted | Rejected:
        """Whether it can run in this process. True, or False, or the reason why not.

        Must be cheap: it imports no kernel library and touches no device.
        """
        return True

    def note(self) -> str:
        """What is particular about how it runs here, or would; empty: nothing. For people, in
        `list`, `explain` and `doctor`, after the word "runs". Imports no kernel library."""
        return ""

    def load(self) -> None:
        """Import the kernels. Called once, before one of its ops is first bound; an
        exception makes the backend unavailable, with the exception as the reason."""

    def set_direct(self, binding: str, on: bool) -> None:
        """Let its `graph_operators` run the kernel at once for a binding, or no longer.

        Such an operator ("namespace::name") has the schema of `torch.ops.vllm_fl.<op>`. While a
        binding is direct, and the op's guard accepts the arguments, it does what `fn` does; every
        other call it passes on to `torch.ops.vllm_fl.<op>` unchanged. Called with True once the
        binding is made, and with False while calls are counted."""

    def implements(
        self,
        op_name: str | None = None,
        *,
        supports_layer: Callable[[Mapping[str, Any]], Any] | None = None,
        supports: Callable[..., Any] | None = None,
        mutates: tuple[str, ...] = (),
        batch_invariant: bool = False,
    ) -> Callable[[F], F]:
        """Mark a function as this backend's implementation of the op of the same name.

        Args: as those of OpImpl; `op_name` only where the function is called otherwise.
        """
        if callable(op_name):
            raise RegistrationError(
                f"{type(self).__name__}.implements takes no function; write "
                f"@backend.implements() above {op_name.__name__}, with parentheses"
            )

        def mark(fn: F) -> F:
            priority = _PRIORITY[self.kind] if self.priority is None else self.priority
            self._implementations.append(
                OpImpl(
                    op_name=op_name or fn.__name__,
                    impl_id=self.impl_id,
                    kind=self.kind,
                    fn=fn,
                    vendor=self.vendor,
                    priority=priority,
                    available=self.is_available,
                    supports_layer=supports_layer,
                    supports=supports,
                    mutates=mutates,
                    batch_invariant=batch_invariant,
                    api_version=self.api_version,
                )
            )
            return fn

        return mark

    @property
    def implementations(self) -> tuple[OpImpl, ...]:
        """What was marked so far, ready for `registry.register_many`."""
        return tuple(self._implementations)
