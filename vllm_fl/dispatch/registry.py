# SPDX-License-Identifier: Apache-2.0
"""OpRegistry: who implements what. Thread-safe, copy-on-write, all or nothing."""

from __future__ import annotations

import contextlib
import difflib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import DuplicateImplementationError, RegistrationError, did_you_mean
from .fork import reset_in_child
from .types import API_VERSION, OpImpl, OpSignature, Origin, PolicyFolder, VendorInfo

__all__ = ["OpRegistry", "OpRegistrySnapshot"]


@dataclass(frozen=True, slots=True)
class _State:
    """One consistent state. Changes build a new one and swap the reference, so that a
    reader without the lock, and a child forked in the middle, sees old or new, never half."""

    impls: Mapping[str, Mapping[str, OpImpl]]
    declarations: Mapping[str, OpSignature]
    vendors: Mapping[str, VendorInfo]
    generation: int
    policies: tuple[PolicyFolder, ...] = ()


_EMPTY = _State({}, {}, {}, 0)


@dataclass(frozen=True, slots=True)
class OpRegistrySnapshot:
    """An immutable copy of a registry at one moment.

    Attributes:
        impls_by_op: op name to its implementations, highest priority first.
        declarations: op name to its signature.
        vendors: vendor name to what is known of it.
        generation: grows by one with every change of the registry.
        policies: folders of policies that packages brought.
    """

    impls_by_op: Mapping[str, tuple[OpImpl, ...]]
    declarations: Mapping[str, OpSignature]
    vendors: Mapping[str, VendorInfo]
    generation: int
    policies: tuple[PolicyFolder, ...] = ()

    def known_vendors(self) -> dict[str, VendorInfo]:
        """Every vendor by name: those that were declared, among them the device table's, and
        those that registered implementations, with the device type that their backend names."""
        known = dict(self.vendors)
        for impl in (impl for impls in self.impls_by_op.values() for impl in impls):
            if impl.vendor is None or impl.vendor in self.vendors:
                continue
            types = getattr(impl.backend, "device_types", None) or ("",)
            if impl.vendor not in known or not known[impl.vendor].device_type:
                known[impl.vendor] = VendorInfo(
                    impl.vendor, types[0], f"registered by {impl.origin}"
                )
        return known

    def undeclared(self) -> dict[str, str | None]:
        """Ops with implementations but no declaration, each with the closest declared name."""
        return {
            name: next(iter(difflib.get_close_matches(name, self.declarations, n=1)), None)
            for name in self.impls_by_op
            if name not in self.declarations
        }

    def unknown_text(self, op_name: str, notes: Iterable[str] = ()) -> str:
        """What to say of an op that nobody declared or registered."""
        names = sorted({*self.declarations, *self.impls_by_op})
        text = f"unknown op '{op_name}'; known: {', '.join(names) or 'none'}."
        return text + did_you_mean(op_name, names) + "".join(f" {note}" for note in notes)

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as JSON-ready data, with origins; functions by qualified name."""
        return {
            "generation": self.generation,
            "ops": {
                op: {
                    "signature": str(self.declarations[op]) if op in self.declarations else None,
                    "implementations": [
                        {
                            "impl_id": impl.impl_id,
                            "kind": impl.kind.value,
                            "vendor": impl.vendor,
                            "priority": int(impl.priority),
                            "mutates": list(impl.mutates),
                            "batch_invariant": impl.batch_invariant,
                            "api_version": impl.api_version,
                            "origin": str(impl.origin) if impl.origin else None,
                            "module": impl.origin.module if impl.origin else None,
                        }
                        for impl in self.impls_by_op.get(op, ())
                    ],
                }
                for op in sorted({*self.impls_by_op, *self.declarations})
            },
            "vendors": sorted(self.vendors),
        }


class _Batch:
    """What one plugin changed, in order, so that all of it can be taken back."""

    __slots__ = ("origin", "undo")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.undo: list[tuple[str, str, Any]] = []


class OpRegistry:
    """Holds declarations and implementations.

    Every method may be called from any thread. Implementations of a declared op are checked
    against its signature; those of an undeclared op are accepted and reported as unchecked.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state = _EMPTY
        self._local = threading.local()
        self.plugins: tuple[Any, ...] | None = None
        """What discovery ran against this registry; None until it did."""
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._removal_guards: list[weakref.WeakMethod[Callable[[str, str], None]]] = []
        reset_in_child(self)

    # ---------------------------------------------------------------- declarations

    def declare(self, signature: OpSignature) -> None:
        """Declare an op. The same declaration twice is fine.

        Raises:
            RegistrationError: the op is declared with another signature.
            SignatureMismatchError: an implementation registered earlier does not fit.
        """
        if not isinstance(signature, OpSignature):
            raise RegistrationError(
                f"declare() takes an OpSignature, found {type(signature).__name__}; "
                'build one with OpSignature.parse("my_op(x, weight)")'
            )
        with self._lock:
            state = self._state
            known = state.declarations.get(signature.op_name)
            if known is not None:
                if known != signature:
                    raise RegistrationError(
                        f"op '{signature.op_name}' is declared as {known}; it cannot be "
                        f"declared again as {signature}{_differences(known, signature)}. "
                        "Declare it once, or give the other op a name of its own."
                    )
                return
            for impl in state.impls.get(signature.op_name, {}).values():
                self._check_signature(impl, signature, impl.origin)
            declarations = {**state.declarations, signature.op_name: signature}
            self._swap(replace(state, declarations=declarations))
            self._record("declare", signature.op_name, "", None)

    def declare_vendor(self, vendor: VendorInfo) -> None:
        """Make a vendor's name known, so that a policy may name it before it registers."""
        with self._lock:
            known = self._state.vendors.get(vendor.name)
            if known == vendor:
                return
            if known is not None:
                raise RegistrationError(
                    f"vendor '{vendor.name}' is already known as {known}, found {vendor}"
                )
            self._swap(replace(self._state, vendors={**self._state.vendors, vendor.name: vendor}))
            self._record("vendor", vendor.name, "", None)

    def add_policies(self, folder: str | Path) -> None:
        """Bring the policies of a package, after what it registers: a folder of YAML files that
        hold `op_backends`, each named as the device or vendor that it is for, e.g. acme.yaml.

        Raises:
            RegistrationError: a file is not right, or orders what another package orders; says
                where, and what is valid.
        """
        from .packaged import check_folder

        with self._lock:
            origin = self._current_origin(str(folder))
            brought = PolicyFolder(Path(folder).resolve(), origin)
            check_folder(brought, self.snapshot())
            self._swap(replace(self._state, policies=(*self._state.policies, brought)))
            self._record("policies", "", "", brought)

    def get_signature(self, op_name: str) -> OpSignature | None:
        """The declaration of an op, or None."""
        return self._state.declarations.get(op_name)

    def known_vendors(self) -> tuple[str, ...]:
        """Names of the vendors declared or registered, sorted."""
        return tuple(sorted(self.snapshot().known_vendors()))

    # ------------------------------------------------------------- implementations

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation; see `register_many`."""
        self.register_many([impl])

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add implementations, all or none.

        Raises:
            DuplicateImplementationError: an (op_name, impl_id) is taken; names both origins.
            SignatureMismatchError: a function does not fit its op's declaration.
            RegistrationError: an element is not an OpImpl, or `mutates` names no parameter.
        """
        incoming = list(impls)
        with self._lock:
            state = self._state
            tables = {op: dict(table) for op, table in state.impls.items()}
            added: list[OpImpl] = []
            for impl in incoming:
                if not isinstance(impl, OpImpl):
                    raise RegistrationError(
                        f"register_many() takes OpImpl objects, found {type(impl).__name__}"
                    )
                origin = self._origin_of(impl)
                _check_api_version(impl, origin)
                taken = tables.get(impl.op_name, {}).get(impl.impl_id)
                if taken is not None:
                    raise DuplicateImplementationError(
                        f"op '{impl.op_name}' already has an implementation "
                        f"'{impl.impl_id}', registered by {_whence(taken.origin)}; "
                        f"{_whence(origin)} registers it again. Choose another impl_id, "
                        f"for example '{impl.impl_id}.2', or unregister the first."
                    )
                signature = state.declarations.get(impl.op_name)
                if signature is not None:
                    self._check_signature(impl, signature, origin)
                stored = replace(impl, origin=origin)
                tables.setdefault(impl.op_name, {})[impl.impl_id] = stored
                added.append(stored)
            if added:
                self._swap(replace(state, impls=tables))
            for stored in added:
                self._record("add", stored.op_name, stored.impl_id, None)

    def get_implementations(self, op_name: str) -> tuple[OpImpl, ...]:
        """All implementations of an op, highest priority first; empty for an unknown op."""
        return _ordered(self._state.impls.get(op_name, {}))

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """One implementation, or None."""
        return self._state.impls.get(op_name, {}).get(impl_id)

    def list_operators(self) -> list[str]:
        """Names of all ops that are declared or have an implementation, sorted."""
        state = self._state
        return sorted({*state.declarations, *state.impls})

    def unregister(self, op_name: str, impl_id: str) -> bool:
        """Remove one implementation; False if there was none.

        Raises:
            DispatchFrozen: a loaded model relies on it.
        """
        with self._lock:
            table = self._state.impls.get(op_name, {})
            impl = table.get(impl_id)
            if impl is None:
                return False
            self._ask_before_removal(op_name, impl_id)
            self._remove(op_name, impl_id)
            self._record("remove", op_name, impl_id, impl)
            return True

    def clear(self) -> None:
        """Remove every implementation, and the policies of packages. Declarations stay.

        Raises:
            DispatchFrozen: a loaded model relies on one of them.
            RegistrationError: a plugin that is registering called it.
        """
        self._refuse_in_a_batch("clear()")
        with self._lock:
            removed = [i for table in self._state.impls.values() for i in table.values()]
            for impl in removed:
                self._ask_before_removal(impl.op_name, impl.impl_id)
            self._swap(replace(self._state, impls={}, policies=()))

    def drop_discovered(self) -> None:
        """Remove what plugins and built-ins registered; keep declarations and manual ones.

        Raises:
            RegistrationError: a plugin that is registering called it.
        """
        self._refuse_in_a_batch("drop_discovered()")
        with self._lock:
            self.plugins = None
            kept = {
                op: {i: impl for i, impl in table.items() if _is_manual(impl)}
                for op, table in self._state.impls.items()
            }
            policies = tuple(p for p in self._state.policies if p.origin.source == "manual")
            self._swap(
                replace(
                    self._state,
                    impls={op: t for op, t in kept.items() if t},
                    policies=policies,
                )
            )

    # ------------------------------------------------------------------- snapshots

    @property
    def policies(self) -> tuple[PolicyFolder, ...]:
        """Those that packages brought."""
        return self._state.policies

    @property
    def generation(self) -> int:
        """Grows by one with every change."""
        return self._state.generation

    def snapshot(self) -> OpRegistrySnapshot:
        """An immutable copy; needs no lock and is not changed by later registrations."""
        state = self._state
        return OpRegistrySnapshot(
            impls_by_op=MappingProxyType(
                {op: _ordered(table) for op, table in sorted(state.impls.items())}
            ),
            declarations=MappingProxyType(dict(state.declarations)),
            vendors=MappingProxyType(dict(state.vendors)),
            generation=state.generation,
            policies=state.policies,
        )

    # --------------------------------------------------------- plugins and managers

    @contextlib.contextmanager
    def batch(self, origin: Origin) -> Iterator[None]:
        """Attribute this thread's registrations to `origin`; on an exception undo them all."""
        outer: _Batch | None = getattr(self._local, "batch", None)
        batch = _Batch(origin)
        self._local.batch = batch
        try:
            yield
        except BaseException:
            self._roll_back(batch)
            raise
        else:
            if outer is not None:
                outer.undo.extend(batch.undo)
        finally:
            self._local.batch = outer

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a bound method after every change. It is held weakly."""
        with self._lock:
            self._listeners.append(weakref.WeakMethod(listener))

    def before_removal(self, guard: Callable[[str, str], None]) -> None:
        """Ask a bound method before (op_name, impl_id) is removed; it may raise. Held weakly."""
        with self._lock:
            self._removal_guards.append(weakref.WeakMethod(guard))

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._local = threading.local()

    # -------------------------------------------------------------------- internals

    def _swap(self, state: _State) -> None:
        self._state = replace(state, generation=self._state.generation + 1)
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                listener()

    def _refuse_in_a_batch(self, what: str) -> None:
        batch: _Batch | None = getattr(self._local, "batch", None)
        if batch is not None:
            raise RegistrationError(
                f"{batch.origin} called registry.{what} while it registers; that would remove what "
                "others registered. Take back what is its own with "
                "registry.unregister(op_name, impl_id)."
            )

    def _remove(self, op_name: str, impl_id: str) -> None:
        tables = {op: dict(table) for op, table in self._state.impls.items()}
        del tables[op_name][impl_id]
        if not tables[op_name]:
            del tables[op_name]
        self._swap(replace(self._state, impls=tables))

    def _ask_before_removal(self, op_name: str, impl_id: str) -> None:
        for reference in self._removal_guards:
            guard = reference()
            if guard is not None:
                guard(op_name, impl_id)

    def _record(self, action: str, op_name: str, impl_id: str, before: Any) -> None:
        batch: _Batch | None = getattr(self._local, "batch", None)
        if batch is not None:
            batch.undo.append((action, op_name, impl_id if before is None else before))

    def _roll_back(self, batch: _Batch) -> None:
        with self._lock:
            for action, name, detail in reversed(batch.undo):
                state = self._state
                if action == "add":
                    if detail in state.impls.get(name, {}):
                        self._remove(name, detail)
                elif action == "declare":
                    rest = {k: v for k, v in state.declarations.items() if k != name}
                    self._swap(replace(state, declarations=rest))
                elif action == "vendor":
                    others = {k: v for k, v in state.vendors.items() if k != name}
                    self._swap(replace(state, vendors=others))
                elif action == "policies":
                    folders = tuple(p for p in state.policies if p is not detail)
                    self._swap(replace(state, policies=folders))
                elif action == "remove":
                    table = {**state.impls.get(name, {}), detail.impl_id: detail}
                    self._swap(replace(state, impls={**state.impls, name: table}))

    def _origin_of(self, impl: OpImpl) -> Origin:
        function = getattr(impl.fn, "__func__", impl.fn)
        module = getattr(function, "__module__", None) or type(impl.fn).__module__
        return replace(self._current_origin(module), module=module)

    def _current_origin(self, name: str) -> Origin:
        """The plugin that is registering, or a manual one of that name."""
        batch: _Batch | None = getattr(self._local, "batch", None)
        return batch.origin if batch is not None else Origin(source="manual", name=name)

    def _check_signature(self, impl: OpImpl, signature: OpSignature, origin: Origin | None) -> None:
        who = f"implementation '{impl.impl_id}' of op '{impl.op_name}' ({origin})"
        signature.check(impl.fn, who=who)
        unknown = [m for m in impl.mutates if m not in signature.parameter_names]
        if unknown:
            raise RegistrationError(
                f"{who}: mutates names {unknown}, which are not parameters of {signature}"
            )


def _whence(origin: Origin | None) -> str:
    return f"{origin} (module {origin.module})" if origin is not None else "an unknown origin"


def _differences(known: OpSignature, new: OpSignature) -> str:
    """What the text of a signature does not show."""
    shown = [
        f"{name} {getattr(new, name)!r} instead of {getattr(known, name)!r}"
        for name in ("inplace", "fact_names", "selector")
        if getattr(new, name) != getattr(known, name)
    ]
    return f" with {', '.join(shown)}" if shown else ""


def _check_api_version(impl: OpImpl, origin: Origin) -> None:
    if impl.api_version != API_VERSION:
        newer = "vllm_fl" if impl.api_version > API_VERSION else str(origin.package or origin.name)
        raise RegistrationError(
            f"implementation '{impl.impl_id}' of op '{impl.op_name}' ({origin}) was written for "
            f"version {impl.api_version} of vllm_fl's API; this is version {API_VERSION}. "
            f"Install a newer {newer}."
        )


def _is_manual(impl: OpImpl) -> bool:
    return impl.origin is None or impl.origin.source == "manual"


def _ordered(table: Mapping[str, OpImpl]) -> tuple[OpImpl, ...]:
    return tuple(sorted(table.values(), key=lambda impl: (-impl.priority, impl.impl_id)))
