# SPDX-License-Identifier: Apache-2.0
"""The facts the dispatcher works on: signatures, implementations, devices, verdicts."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .errors import RegistrationError
from .signature import REQUIRED, OpSignature, Parameter

__all__ = [
    "ACCEPTED",
    "API_VERSION",
    "REQUIRED",
    "Accepted",
    "BackendImplKind",
    "BackendLike",
    "BackendPriority",
    "DeviceFacts",
    "OpImpl",
    "OpSignature",
    "Origin",
    "Parameter",
    "PolicyFolder",
    "Rejected",
    "VendorInfo",
    "Verdict",
    "as_verdict",
    "is_installed",
]

API_VERSION = 1
"""Version of the contract between vllm_fl and a vendor's package."""


class BackendImplKind(enum.StrEnum):
    """Where an implementation comes from."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class BackendPriority(enum.IntEnum):
    """Default priorities; higher wins. A vendor's faster second family may use 110."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


@dataclass(frozen=True, slots=True)
class Accepted:
    """A guard's or a probe's yes."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Rejected:
    """A guard's or a probe's no, with the reason a user will read.

    Attributes:
        reason: one concrete sentence, e.g. "hidden_size 576 is not a multiple of 128".
        code: a stable word for machines, e.g. "guard", "device", "requires".
    """

    reason: str
    code: str = "guard"

    def __bool__(self) -> bool:
        return False


Verdict = Accepted | Rejected
ACCEPTED = Accepted()


def as_verdict(value: object, *, code: str = "guard", default_reason: str = "refused") -> Verdict:
    """Read what a guard or probe returned: True, False, a reason, Accepted or Rejected.

    Raises:
        TypeError: for anything else, so that a guard which forgets to return is found.
    """
    if value is True:
        return ACCEPTED
    if isinstance(value, (Accepted, Rejected)):
        return value
    if value is False:
        return Rejected(default_reason, code)
    if isinstance(value, str):
        return Rejected(value or default_reason, code)
    raise TypeError(
        f"a guard must return True, False, a reason (str), Accepted() or Rejected(reason); "
        f"this one returned {value!r} of type {type(value).__name__}"
    )


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the dispatcher knows of a device, without touching it.

    Attributes:
        vendor: the vendor's name as used in impl ids, e.g. "cpu", "cuda", "ascend".
        device_type: PyTorch's device type, e.g. "cpu", "cuda", "npu".
        name: the product's name where known, e.g. "NVIDIA H200".
        arch: an architecture or instruction-set word where known, e.g. "sm_90".
        assumed: True when the facts were stated for a what-if, not observed here.
        assumed_modules: modules that a what-if takes as installed.
        absent_modules: modules that a what-if takes as not installed, whatever this machine has.
    """

    vendor: str
    device_type: str
    name: str = ""
    arch: str = ""
    assumed: bool = False
    assumed_modules: tuple[str, ...] = ()
    absent_modules: tuple[str, ...] = ()

    @property
    def device_class(self) -> str:
        """Equal for devices that may share decisions and compiled artifacts."""
        parts = dict.fromkeys((self.vendor, self.device_type, self.arch))
        return ":".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class VendorInfo:
    """A vendor known by name, and the PyTorch device type its chips have."""

    name: str
    device_type: str
    summary: str = ""

    def __post_init__(self) -> None:
        _check_vendor_name(f"VendorInfo(name={self.name!r})", self.name)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who registered something.

    Attributes:
        source: "builtin", "entry_point", "module" (VLLM_FL_PLUGIN_MODULES) or "manual".
        name: the plugin's name, or the function's module for a manual registration.
        package: the distribution, where known.
        version: its version, where known.
        module: the module that holds the implementation's function.
    """

    source: str
    name: str
    package: str = ""
    version: str = ""
    module: str = ""

    def __str__(self) -> str:
        what = {"entry_point": "entry point", "module": "plugin module"}.get(
            self.source, self.source
        )
        package = f", {self.package} {self.version}".rstrip() if self.package else ""
        return f"{what} '{self.name}'{package}"


@runtime_checkable
class BackendLike(Protocol):
    """What the dispatcher asks of a backend object (see vllm_fl.backends.Backend)."""

    @property
    def device_types(self) -> tuple[str, ...] | None: ...

    @property
    def requires(self) -> tuple[str, ...]: ...

    def is_available(self) -> bool | str | Accepted | Rejected: ...

    def load(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """The policies that a package brought for devices.

    Attributes:
        folder: holds YAML files, each named as the device or vendor that it is for.
        origin: who brought it.
    """

    folder: Path
    origin: Origin


_FORBIDDEN_IN_ID = set(" \t\n;|=,:")


def _check_vendor_name(who: str, name: object) -> None:
    """Refuse a name that no setting and no id could hold."""
    if not isinstance(name, str) or not name or _FORBIDDEN_IN_ID & set(name):
        raise RegistrationError(
            f"{who}: a vendor's name must be a non-empty string without spaces and without any of "
            "; | = , : (they separate names in settings)"
        )


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One implementation of one op.

    Attributes:
        op_name: the op it implements.
        impl_id: "default.flaggems", "reference.torch", "vendor.<vendor>" or
            "vendor.<vendor>.<name>"; unique within the op.
        kind: DEFAULT (FlagGems), VENDOR or REFERENCE.
        fn: the function; parameters exactly as the op declares them.
        vendor: the vendor's name for kind VENDOR, else None.
        priority: higher wins; see BackendPriority.
        available: a probe without arguments for this implementation alone, or the
            `is_available` of the backend it belongs to. Returns True, False or a reason.
        supports_layer: guard on what is fixed when a layer is built; takes the mapping of
            the op's facts, returns True or a reason. Reads metadata only.
        supports: guard on what changes from call to call; takes the call's arguments,
            returns True or a reason. Reads metadata only.
        mutates: parameters that `fn` writes. The dispatcher clones them unless the
            caller gave them up with `bind(..., donate=True)`.
        batch_invariant: True if a row's result does not depend on the batch around it.
        api_version: the vllm_fl API the implementation was written for.
        origin: who registered it; set in the copy that the registry keeps.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    available: Callable[[], Any] | None = None
    supports_layer: Callable[[Mapping[str, Any]], Any] | None = None
    supports: Callable[..., Any] | None = None
    mutates: tuple[str, ...] = ()
    batch_invariant: bool = False
    api_version: int = API_VERSION
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        who = f"OpImpl(op_name={self.op_name!r}, impl_id={self.impl_id!r})"
        if not isinstance(self.op_name, str) or not self.op_name.isidentifier():
            raise RegistrationError(f"{who}: op_name must be a Python identifier")
        if (
            not isinstance(self.impl_id, str)
            or not self.impl_id
            or _FORBIDDEN_IN_ID & set(self.impl_id)
        ):
            raise RegistrationError(
                f"{who}: impl_id must be a non-empty string without spaces and without any of "
                "; | = , : (they separate entries of VLLM_FL_PER_OP)"
            )
        try:
            object.__setattr__(self, "kind", BackendImplKind(self.kind))
        except ValueError:
            raise RegistrationError(
                f"{who}: kind must be one of {', '.join(k.value for k in BackendImplKind)}, "
                f"found {self.kind!r}"
            ) from None
        for name in ("fn", "available", "supports_layer", "supports"):
            value = getattr(self, name)
            if not callable(value) and not (name != "fn" and value is None):
                raise RegistrationError(f"{who}: {name} must be callable, found {value!r}")
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise RegistrationError(f"{who}: kind VENDOR needs vendor='<name>'")
        if self.vendor is not None:
            _check_vendor_name(f"{who}: vendor={self.vendor!r}", self.vendor)
        if self.kind is not BackendImplKind.VENDOR and self.vendor is not None:
            raise RegistrationError(
                f"{who}: vendor={self.vendor!r} goes with kind VENDOR only, found {self.kind}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RegistrationError(f"{who}: priority must be an int, found {self.priority!r}")
        if isinstance(self.api_version, bool) or not isinstance(self.api_version, int):
            raise RegistrationError(
                f"{who}: api_version must be an int, found {self.api_version!r}"
            )
        if isinstance(self.mutates, str) or not all(isinstance(m, str) for m in self.mutates):
            raise RegistrationError(f"{who}: mutates must be a tuple of parameter names")
        object.__setattr__(self, "mutates", tuple(self.mutates))

    @property
    def backend(self) -> BackendLike | None:
        """The backend object that `fn` or `available` is a bound method of, if any."""
        for member in (self.fn, self.available):
            owner = getattr(member, "__self__", None)
            if isinstance(owner, BackendLike):
                return owner
        return None

    def availability(self, device: DeviceFacts | None = None) -> Verdict:
        """Ask, in this order: device type, requirements, the backend, the own probe.

        Args:
            device: the device to answer for; None skips the device check. For an assumed
                device the probes are not run, because they can only speak of this machine.

        Returns:
            Accepted, or Rejected with code "device", "requires", "unavailable" or
            "probe_error". A probe that raises is a rejection, never an exception.
        """
        backend = self.backend
        if backend is not None:
            refusal = _device_verdict(backend, device) if device is not None else None
            if refusal is not None:
                return refusal
            refusal = _requires_verdict(backend, device)
            if refusal is not None:
                return refusal
        if device is not None and device.assumed:
            return ACCEPTED
        probes: list[Callable[[], Any]] = []
        if backend is not None:
            probes.append(backend.is_available)
        if self.available is not None and self.available not in probes:
            probes.append(self.available)
        for probe in probes:
            try:
                verdict = as_verdict(
                    probe(),
                    code="unavailable",
                    default_reason="its availability probe says no",
                )
            except (Exception, SystemExit) as error:
                return Rejected(
                    f"its availability probe raised {type(error).__name__}: {error}",
                    "probe_error",
                )
            if not verdict:
                return verdict
        return ACCEPTED

    def is_available(self) -> bool:
        """Whether it could run on this machine, as far as its backend can tell."""
        return bool(self.availability())


def _device_verdict(backend: BackendLike, device: DeviceFacts) -> Rejected | None:
    types = backend.device_types
    if types is not None and device.device_type not in types:
        return Rejected(
            f"runs on {' or '.join(types)}, this device is {device.device_type}", "device"
        )
    vendors = getattr(backend, "vendors", None)  # not every BackendLike needs to have it
    if vendors is not None and device.vendor not in vendors:
        return Rejected(
            f"runs on chips of {' or '.join(vendors)}, this one is {device.vendor}'s", "device"
        )
    return None


def _requires_verdict(backend: BackendLike, device: DeviceFacts | None) -> Rejected | None:
    assumed = device.assumed_modules if device is not None else ()
    absent = device.absent_modules if device is not None else ()
    if out := [m for m in backend.requires if m in absent]:
        return Rejected(f"requires {', '.join(out)}, not assumed to be installed there", "requires")
    missing = [m for m in backend.requires if m not in assumed and not is_installed(m)]
    if not missing:
        return None
    return Rejected(f"requires {', '.join(missing)}, not installed", "requires")


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
