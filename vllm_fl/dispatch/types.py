# SPDX-License-Identifier: Apache-2.0
"""The facts the dispatcher works on: signatures, implementations, devices, verdicts."""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .errors import RegistrationError, SignatureMismatchError

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
    "Rejected",
    "VendorInfo",
    "Verdict",
    "as_verdict",
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


class _Required(enum.Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required.REQUIRED
"""Marks a parameter that has no default."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared parameter: its name and its default, or REQUIRED."""

    name: str
    default: Any = REQUIRED

    def __str__(self) -> str:
        return self.name if self.default is REQUIRED else f"{self.name}={self.default!r}"


@dataclass(frozen=True, slots=True)
class OpSignature:
    """The torch-free half of an op's contract.

    Attributes:
        op_name: the op's one name.
        parameters: names, order and defaults; every implementation has exactly these.
        inplace: arguments that an in-place form writes; empty where there is none.
        facts: computes, from a call's arguments, the mapping that `supports_layer` guards
            read. It reads metadata only. None: guards of this op get an empty mapping.
        fact_names: the keys of that mapping, i.e. what `bind(op, **facts)` takes.
        selector: True for a question of configuration (it returns a class path, not
            tensors): no reference, no torch op.
        summary: one line for people.
    """

    op_name: str
    parameters: tuple[Parameter, ...]
    inplace: tuple[str, ...] = ()
    facts: Callable[..., Mapping[str, Any]] | None = field(default=None, compare=False)
    fact_names: tuple[str, ...] = ()
    selector: bool = False
    summary: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.op_name.isidentifier():
            raise RegistrationError(f"op name {self.op_name!r} is not a Python identifier")
        names = [p.name for p in self.parameters]
        if len(set(names)) != len(names):
            raise RegistrationError(f"{self}: a parameter name occurs twice")
        unknown = [n for n in self.inplace if n not in names]
        if unknown:
            raise RegistrationError(f"{self}: inplace names {unknown}, which are not parameters")

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        inplace: tuple[str, ...] = (),
        facts: Callable[..., Mapping[str, Any]] | None = None,
        fact_names: tuple[str, ...] = (),
        selector: bool = False,
        summary: str = "",
    ) -> OpSignature:
        """Build a signature from text such as ``"rms_norm(x, weight, epsilon=1e-6)"``."""
        try:
            definition = ast.parse(f"def {text}: ...").body[0]
            assert isinstance(definition, ast.FunctionDef)
            arguments = definition.args
            if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
                raise ValueError("only plain parameters are allowed")
            defaults = [ast.literal_eval(node) for node in arguments.defaults]
        except (SyntaxError, ValueError, AssertionError) as error:
            raise RegistrationError(f"cannot read the signature {text!r}: {error}") from error
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
        required = len(names) - len(defaults)
        return cls(
            op_name=definition.name,
            parameters=tuple(
                Parameter(name, defaults[i - required] if i >= required else REQUIRED)
                for i, name in enumerate(names)
            ),
            inplace=inplace,
            facts=facts,
            fact_names=fact_names,
            selector=selector,
            summary=summary,
        )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameter names in order."""
        return tuple(p.name for p in self.parameters)

    def __str__(self) -> str:
        return f"{self.op_name}({', '.join(map(str, self.parameters))})"

    def check(self, fn: Callable[..., Any], *, who: str) -> None:
        """Refuse a function whose parameters differ from the declared ones.

        Args:
            fn: the function of an implementation; annotations are not looked at.
            who: names the implementation and its origin in the error.

        Raises:
            SignatureMismatchError: naming each difference and what was expected.
        """
        try:
            found = inspect.signature(fn)
        except (TypeError, ValueError) as error:
            raise SignatureMismatchError(
                f"{who}: the parameters of {_describe(fn)} cannot be read ({error}); "
                f"expected {self}. Wrap it in a Python function with these parameters."
            ) from None
        problems = self._differences(found)
        if problems:
            raise SignatureMismatchError(
                f"{who}: {_describe(fn)}{found} does not fit the declared signature {self}: "
                f"{'; '.join(problems)}. Rename, reorder or add the parameters as declared."
            )

    def _differences(self, found: inspect.Signature) -> list[str]:
        parameters = list(found.parameters.values())
        problems = [
            f"{'*' if p.kind is p.VAR_POSITIONAL else '**'}{p.name} is not allowed, "
            "because it hides the parameters"
            for p in parameters
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        problems += [
            f"parameter '{p.name}' must be callable by position and by name"
            for p in parameters
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
        ]
        plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in plain]
        expected = list(self.parameter_names)
        missing = [n for n in expected if n not in names]
        extra = [n for n in names if n not in expected]
        if missing:
            problems.append(f"missing {_quoted(missing)}")
        if extra:
            problems.append(f"unexpected {_quoted(extra)}")
        if not missing and not extra and names != expected:
            problems.append(f"order is ({', '.join(names)}), expected ({', '.join(expected)})")
        declared = {p.name: p for p in self.parameters}
        for p in plain:
            if p.name not in declared:
                continue
            want = declared[p.name].default
            have = REQUIRED if p.default is p.empty else p.default
            if not _same_default(have, want):
                problems.append(
                    f"'{p.name}' has {_default_text(have)}, expected {_default_text(want)}"
                )
        return problems


def _same_default(have: object, want: object) -> bool:
    return have is want or (type(have) is type(want) and bool(have == want))


def _default_text(value: object) -> str:
    return "no default" if value is REQUIRED else f"default {value!r}"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{n}'" for n in names)


def _describe(fn: Callable[..., Any]) -> str:
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return f"{module}.{name}" if module else name


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
    """

    vendor: str
    device_type: str
    name: str = ""
    arch: str = ""
    assumed: bool = False
    assumed_modules: tuple[str, ...] = ()

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


_FORBIDDEN_IN_ID = set(" \t\n;|=,:")


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
        if self.kind is not BackendImplKind.VENDOR and self.vendor is not None:
            raise RegistrationError(
                f"{who}: vendor={self.vendor!r} goes with kind VENDOR only, found {self.kind}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RegistrationError(f"{who}: priority must be an int, found {self.priority!r}")
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
            assumed = device.assumed_modules if device is not None else ()
            refusal = _requires_verdict(backend, assumed)
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
            except Exception as error:
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
    if types is None or device.device_type in types:
        return None
    return Rejected(f"runs on {' or '.join(types)}, this device is {device.device_type}", "device")


def _requires_verdict(backend: BackendLike, assumed: tuple[str, ...]) -> Rejected | None:
    missing = [m for m in backend.requires if m not in assumed and not _installed(m)]
    if not missing:
        return None
    return Rejected(f"requires {', '.join(missing)}, not installed", "requires")


def _installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
