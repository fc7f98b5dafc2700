# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from vllm_fl.backends import Backend
from vllm_fl.dispatch.errors import RegistrationError, SignatureMismatchError
from vllm_fl.dispatch.types import (
    ACCEPTED,
    REQUIRED,
    Accepted,
    BackendImplKind,
    BackendPriority,
    DeviceFacts,
    OpImpl,
    OpSignature,
    Origin,
    Parameter,
    Rejected,
    VendorInfo,
    as_verdict,
)

from .helpers import SCALE, make_impl, scale


def test_kinds_are_strings_with_the_values_users_write() -> None:
    assert [kind.value for kind in BackendImplKind] == ["flagos", "vendor", "reference"]
    assert BackendImplKind.DEFAULT == "flagos"
    assert f"{BackendImplKind.VENDOR}" == "vendor"


def test_priorities_are_ints_and_default_beats_vendor_beats_reference() -> None:
    assert [(p.name, int(p)) for p in BackendPriority] == [
        ("DEFAULT", 150),
        ("VENDOR", 100),
        ("REFERENCE", 50),
    ]
    assert BackendPriority.VENDOR < 110 < BackendPriority.DEFAULT


# ------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("value", [True, ACCEPTED, Accepted()])
def test_a_verdict_reads_a_yes(value: object) -> None:
    assert as_verdict(value) == ACCEPTED
    assert as_verdict(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, Rejected("no reason given", "device")),
        ("too wide", Rejected("too wide", "device")),
        ("", Rejected("no reason given", "device")),
        (Rejected("too wide", "mine"), Rejected("too wide", "mine")),
    ],
)
def test_a_verdict_reads_a_no_with_its_reason(value: object, expected: Rejected) -> None:
    verdict = as_verdict(value, code="device", default_reason="no reason given")
    assert verdict == expected
    assert not verdict


@pytest.mark.parametrize("value", [None, 1, 0, [True]])
def test_a_guard_that_returns_something_else_is_an_error(value: object) -> None:
    with pytest.raises(TypeError) as caught:
        as_verdict(value)
    assert str(caught.value) == (
        "a guard must return True, False, a reason (str), Accepted() or Rejected(reason); "
        f"this one returned {value!r} of type {type(value).__name__}"
    )


# ----------------------------------------------------------------------------- signatures


def test_a_signature_is_read_from_text() -> None:
    signature = OpSignature.parse('gelu(x, weight=None, approximate="none", epsilon=1e-6)')
    assert signature.op_name == "gelu"
    assert signature.parameter_names == ("x", "weight", "approximate", "epsilon")
    assert signature.parameters == (
        Parameter("x", REQUIRED),
        Parameter("weight", None),
        Parameter("approximate", "none"),
        Parameter("epsilon", 1e-6),
    )
    assert str(signature) == "gelu(x, weight=None, approximate='none', epsilon=1e-06)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gelu(x", "'(' was never closed"),
        ("gelu(*x)", "only plain parameters are allowed"),
        ("gelu(x, *, y)", "only plain parameters are allowed"),
        ("gelu(**x)", "only plain parameters are allowed"),
        ("gelu(x, y=math.pi)", "malformed node or string"),
    ],
)
def test_an_unreadable_signature_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        OpSignature.parse(text)
    assert str(caught.value).startswith(f"cannot read the signature {text!r}: {problem}")


def test_a_signature_refuses_names_that_contradict_it() -> None:
    with pytest.raises(RegistrationError, match=r"^op name 'a-b' is not a Python identifier$"):
        OpSignature("a-b", ())
    with pytest.raises(RegistrationError, match=r"^f\(x, x\): a parameter name occurs twice$"):
        OpSignature("f", (Parameter("x"), Parameter("x")))
    with pytest.raises(RegistrationError) as caught:
        OpSignature.parse("f(x)", inplace=("y",))
    assert str(caught.value) == "f(x): inplace names ['y'], which are not parameters"


def _renamed(x: Any, scale: Any = 2) -> None: ...
def _missing(x: Any) -> None: ...
def _reordered(factor: Any, x: Any) -> None: ...
def _other_default(x: Any, factor: Any = 3) -> None: ...
def _other_type_of_default(x: Any, factor: Any = 2.0) -> None: ...
def _no_default(x: Any, factor: Any) -> None: ...
def _added_default(x: Any = None, factor: Any = 2) -> None: ...
def _added(x: Any, factor: Any = 2, out: Any = None) -> None: ...
def _starred(*args: Any) -> None: ...
def _double_starred(x: Any, factor: Any = 2, **more: Any) -> None: ...
def _keyword_only(x: Any, *, factor: Any = 2) -> None: ...
def _positional_only(x: Any, /, factor: Any = 2) -> None: ...


@pytest.mark.parametrize(
    ("fn", "difference"),
    [
        (_renamed, "missing 'factor'; unexpected 'scale'"),
        (_missing, "missing 'factor'"),
        (_added, "unexpected 'out'"),
        (
            _reordered,
            "order is (factor, x), expected (x, factor); 'factor' has no default, "
            "expected default 2",
        ),
        (_other_default, "'factor' has default 3, expected default 2"),
        (_other_type_of_default, "'factor' has default 2.0, expected default 2"),
        (_no_default, "'factor' has no default, expected default 2"),
        (_added_default, "'x' has default None, expected no default"),
        (
            _starred,
            "*args is not allowed, because it hides the parameters; missing 'x', 'factor'",
        ),
        (_double_starred, "**more is not allowed, because it hides the parameters"),
        (_keyword_only, "parameter 'factor' must be callable by position and by name"),
        (_positional_only, "parameter 'x' must be callable by position and by name"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_with_each_difference(
    fn: Any, difference: str
) -> None:
    with pytest.raises(SignatureMismatchError) as caught:
        SCALE.check(fn, who="implementation 'vendor.acme'")
    assert str(caught.value) == (
        f"implementation 'vendor.acme': {__name__}.{fn.__name__}{inspect.signature(fn)} does not "
        f"fit the declared signature scale(x, factor=2): {difference}. Rename, reorder or add "
        "the parameters as declared."
    )


def test_a_function_without_readable_parameters_is_refused_with_advice() -> None:
    with pytest.raises(SignatureMismatchError) as caught:
        OpSignature.parse("f(x)").check(max, who="somebody")
    assert str(caught.value) == (
        "somebody: the parameters of builtins.max cannot be read (no signature found for builtin "
        "<built-in function max>); expected f(x). Wrap it in a Python function with these "
        "parameters."
    )


def test_annotations_are_not_looked_at_and_methods_are_read_without_self() -> None:
    class Kernels:
        def scale(self, x, factor=2):
            return x * factor

    SCALE.check(Kernels().scale, who="somebody")
    SCALE.check(scale, who="somebody")


def test_equal_defaults_of_nan_are_the_same_object() -> None:
    nan = math.nan

    def f(x: Any = nan) -> None: ...

    OpSignature("f", (Parameter("x", nan),)).check(f, who="somebody")


# -------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (DeviceFacts("cpu", "cpu"), "cpu"),
        (DeviceFacts("cuda", "cuda", "NVIDIA H200", "sm_90"), "cuda:sm_90"),
        (DeviceFacts("ascend", "npu"), "ascend:npu"),
        (DeviceFacts("cpu", "cpu", arch="avx512"), "cpu:avx512"),
    ],
)
def test_a_device_class_leaves_out_the_product_and_repetitions(
    device: DeviceFacts, expected: str
) -> None:
    assert device.device_class == expected


def test_an_origin_tells_its_source_and_package() -> None:
    assert str(Origin("entry_point", "acme", "vllm-plugin-acme", "1.0", "m")) == (
        "entry point 'acme', vllm-plugin-acme 1.0"
    )
    assert str(Origin("module", "my_kernels")) == "plugin module 'my_kernels'"
    assert str(Origin("manual", "__main__")) == "manual '__main__'"


# -------------------------------------------------------------------------------- OpImpl


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"op_name": "rms norm"}, "op_name must be a Python identifier"),
        ({"op_name": None}, "op_name must be a Python identifier"),
        (
            {"impl_id": ""},
            "impl_id must be a non-empty string without spaces and without any of ; | = , : "
            "(they separate entries of VLLM_FL_PER_OP)",
        ),
        (
            {"impl_id": "vendor:acme"},
            "impl_id must be a non-empty string without spaces and without any of ; | = , : "
            "(they separate entries of VLLM_FL_PER_OP)",
        ),
        ({"kind": "gems"}, "kind must be one of flagos, vendor, reference, found 'gems'"),
        ({"fn": None}, "fn must be callable, found None"),
        ({"available": True}, "available must be callable, found True"),
        ({"supports": "x"}, "supports must be callable, found 'x'"),
        ({"supports_layer": 1}, "supports_layer must be callable, found 1"),
        ({"vendor": None}, "kind VENDOR needs vendor='<name>'"),
        (
            {"vendor": "acme inc"},
            "vendor='acme inc': a vendor's name must be a non-empty string without spaces and "
            "without any of ; | = , : (they separate names in settings)",
        ),
        (
            {"kind": BackendImplKind.REFERENCE},
            "vendor='acme' goes with kind VENDOR only, found reference",
        ),
        ({"priority": "high"}, "priority must be an int, found 'high'"),
        ({"priority": True}, "priority must be an int, found True"),
        ({"mutates": "x"}, "mutates must be a tuple of parameter names"),
        ({"mutates": (1,)}, "mutates must be a tuple of parameter names"),
    ],
)
def test_a_malformed_implementation_is_refused_and_named(
    fields: dict[str, Any], problem: str
) -> None:
    good: dict[str, Any] = {
        "op_name": "scale",
        "impl_id": "vendor.acme",
        "kind": BackendImplKind.VENDOR,
        "fn": scale,
        "vendor": "acme",
    }
    OpImpl(**good)
    given = good | fields
    with pytest.raises(RegistrationError) as caught:
        OpImpl(**given)
    assert str(caught.value) == (
        f"OpImpl(op_name={given['op_name']!r}, impl_id={given['impl_id']!r}): {problem}"
    )


def test_an_implementation_takes_the_word_of_its_kind_and_a_list_of_mutated_names() -> None:
    impl = OpImpl("scale", "vendor.acme", "vendor", scale, "acme", mutates=["x"])
    assert impl.kind is BackendImplKind.VENDOR
    assert impl.mutates == ("x",)
    assert hash(impl) == hash(
        OpImpl("scale", "vendor.acme", "vendor", scale, "acme", mutates=("x",))
    )


def test_an_implementation_without_backend_or_probe_is_available() -> None:
    impl = make_impl("reference.torch")
    assert impl.backend is None
    assert impl.is_available() is True
    assert impl.availability() == ACCEPTED


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (lambda: True, ACCEPTED),
        (lambda: False, Rejected("its availability probe says no", "unavailable")),
        (lambda: "no driver", Rejected("no driver", "unavailable")),
        (
            lambda: 1 / 0,
            Rejected(
                "its availability probe raised ZeroDivisionError: division by zero", "probe_error"
            ),
        ),
        (
            lambda: None,
            Rejected(
                "its availability probe raised TypeError: a guard must return True, False, a "
                "reason (str), Accepted() or Rejected(reason); this one returned None of type "
                "NoneType",
                "probe_error",
            ),
        ),
    ],
)
def test_a_probe_answers_and_one_that_raises_is_a_no(probe: Any, expected: Any) -> None:
    impl = make_impl("vendor.acme", available=probe)
    assert impl.availability() == expected
    assert impl.is_available() is bool(expected)


class _Acme(Backend):
    impl_id = "vendor.acme"
    vendor = "acme"
    device_types = ("acme", "acme2")
    requires = ("acme_driver_that_is_not_installed", "json")

    def __init__(self, answer: Any = True) -> None:
        super().__init__()
        self.answer, self.asked = answer, 0

    def is_available(self) -> Any:
        self.asked += 1
        return self.answer

    def scale(self, x: Any, factor: Any = 2) -> Any:
        return x * factor


class _Ready(_Acme):
    requires = ("json",)


def test_a_backend_is_asked_only_once_device_and_requirements_agree() -> None:
    backend = _Acme()
    impl = make_impl("vendor.acme", backend.scale)
    assert impl.backend is backend
    assert impl.availability(DeviceFacts("cpu", "cpu")) == Rejected(
        "runs on acme or acme2, this device is cpu", "device"
    )
    assert impl.availability(DeviceFacts("acme", "acme")) == Rejected(
        "requires acme_driver_that_is_not_installed, not installed", "requires"
    )
    assert impl.is_available() is False
    assert backend.asked == 0


def test_a_backend_may_run_on_the_chips_of_some_vendors_of_a_device_type_only() -> None:
    class Compiled(_Ready):
        device_types = ("cuda",)
        vendors = ("cuda", "rocm")

    impl = make_impl("vendor.acme", Compiled().scale)
    assert impl.availability(DeviceFacts("rocm", "cuda")) == ACCEPTED
    assert impl.availability(DeviceFacts("metax", "cuda")) == Rejected(
        "runs on chips of cuda or rocm, this one is metax's", "device"
    )
    assert impl.availability() == ACCEPTED  # of no device in particular


def test_a_backend_whose_requirements_are_met_gives_its_own_answer() -> None:
    backend = _Ready("firmware 3 is too old")
    impl = make_impl("vendor.acme", backend.scale)
    assert impl.availability(DeviceFacts("acme", "acme")) == Rejected(
        "firmware 3 is too old", "unavailable"
    )
    backend.answer = True
    assert impl.availability(DeviceFacts("acme", "acme")) == ACCEPTED
    assert impl.is_available() is True
    assert backend.asked == 3


def test_a_backend_is_found_through_its_probe_and_asked_once() -> None:
    backend = _Ready()
    impl = make_impl("vendor.acme", available=backend.is_available)
    assert impl.backend is backend
    assert impl.is_available()
    assert backend.asked == 1


def test_the_own_probe_of_an_implementation_is_asked_after_its_backend() -> None:
    backend = _Ready()
    impl = make_impl("vendor.acme", backend.scale, available=lambda: "this op needs version 4")
    assert impl.availability() == Rejected("this op needs version 4", "unavailable")
    assert backend.asked == 1


def test_a_what_if_takes_stated_modules_as_installed_and_runs_no_probe() -> None:
    backend = _Acme("not on this machine")
    impl = make_impl("vendor.acme", backend.scale, available=lambda: 1 / 0)
    missing = "acme_driver_that_is_not_installed"
    assert impl.availability(DeviceFacts("acme", "acme", assumed=True)) == Rejected(
        f"requires {missing}, not installed", "requires"
    )
    stated = DeviceFacts("acme", "acme", assumed=True, assumed_modules=(missing,))
    assert impl.availability(stated) == ACCEPTED
    assert backend.asked == 0


def test_a_requirement_is_looked_up_and_not_imported(write_module: Any) -> None:
    write_module("acme_explosive", "raise RuntimeError('imported')")

    class Explosive(_Acme):
        requires = ("acme_explosive",)

    assert make_impl("vendor.acme", Explosive().scale).is_available()


# ------------------------------------------------------------------------------- Backend


def test_a_backend_marks_functions_and_fills_in_what_they_share() -> None:
    backend = _Ready()

    def guard(x: Any, factor: Any = 2) -> bool:
        return True

    @backend.implements(supports=guard, mutates=("x",), batch_invariant=True)
    def scale(x: Any, factor: Any = 2) -> Any:
        return x

    @backend.implements("shift")
    def _shift(x: Any) -> Any:
        return x

    first, second = backend.implementations
    assert first == OpImpl(
        "scale",
        "vendor.acme",
        BackendImplKind.VENDOR,
        scale,
        vendor="acme",
        priority=100,
        available=backend.is_available,
        supports=guard,
        mutates=("x",),
        batch_invariant=True,
    )
    assert (second.op_name, second.fn, second.backend) == ("shift", _shift, backend)


def test_a_backend_may_set_its_priority() -> None:
    class Fast(_Ready):
        impl_id = "vendor.acme.fast"
        priority = 110

    backend = Fast()
    backend.implements()(scale)
    assert backend.implementations[0].priority == 110


def test_implements_without_parentheses_is_refused() -> None:
    with pytest.raises(RegistrationError) as caught:
        _Ready().implements(scale)
    assert str(caught.value) == (
        "_Ready.implements takes no function; write @backend.implements() above scale, with "
        "parentheses"
    )


@pytest.mark.parametrize("name", ["device_types", "vendors", "requires"])
def test_a_backend_with_a_string_for_a_tuple_is_refused(name: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        type("Wrong", (Backend,), {name: "acme"})
    assert str(caught.value) == (
        f"Wrong.{name} must be a tuple of names, found the string 'acme'; write ('acme',)"
    )


def test_a_module_that_would_be_imported_to_be_found_is_no_requirement() -> None:
    with pytest.raises(RegistrationError) as caught:
        type("Wrong", (Backend,), {"requires": ("torch", "vllm.utils")})
    assert str(caught.value) == (
        "Wrong.requires must name top-level modules, found 'vllm.utils': to look for it would "
        "import vllm; name that, and ask for the rest in is_available()"
    )


@pytest.mark.parametrize("name", ["acme inc", "", "a:b", None])
def test_a_vendor_is_declared_by_a_name_that_a_setting_can_hold(name: Any) -> None:
    with pytest.raises(RegistrationError) as caught:
        VendorInfo(name, "acme")
    assert str(caught.value) == (
        f"VendorInfo(name={name!r}): a vendor's name must be a non-empty string without spaces and "
        "without any of ; | = , : (they separate names in settings)"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing a required argument: 'x'; called with ()"),
        ((1, 2, 3), {}, "too many positional arguments; called with (int, int, int)"),
        ((1,), {"y": 2}, "got an unexpected keyword argument 'y'; called with (int, y=int)"),
        ((1,), {"x": 2}, "multiple values for argument 'x'; called with (int, x=int)"),
    ],
)
def test_arguments_that_an_op_does_not_take_are_told_with_its_signature(
    args: Any, kwargs: Any, problem: str
) -> None:
    signature = OpSignature.parse("scale(x, factor=2)")
    with pytest.raises(TypeError) as caught:
        signature.check_arguments(args, kwargs)
    assert str(caught.value) == f"op scale(x, factor=2): {problem}"


def test_arguments_that_an_op_takes_are_those_of_its_signature() -> None:
    signature = OpSignature.parse("scale(x, factor=2)")
    for args, kwargs in (((1,), {}), ((1, 2), {}), ((), {"factor": 1, "x": 2})):
        signature.check_arguments(args, kwargs)
