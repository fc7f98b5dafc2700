# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from vllm_fl.backends import Backend
from vllm_fl.dispatch import (
    GuardRejected,
    NoImplementationError,
    OpImpl,
    OpSignature,
    call_op,
    default,
    get_default_manager,
)
from vllm_fl.dispatch.binding import reachable

from .helpers import SCALE, Buffer, make_impl, make_manager, returning, scale

SIZED = OpSignature.parse(
    "scale(x, factor=2)",
    facts=lambda x, factor=2: {"size": x, "factor": factor},
    fact_names=("size", "factor"),
)


def small(facts: Mapping[str, Any]) -> bool | str:
    return facts["size"] < 10 or f"size {facts['size']} is not below 10"


def even(x: Any, factor: Any = 2) -> bool | str:
    return x % 2 == 0 or f"{x} is odd"


# ------------------------------------------------------------------- without a guard


def test_bind_and_resolve_return_the_function_itself_where_no_guard_is_left() -> None:
    manager = make_manager(make_impl("vendor.acme"), make_impl("reference.torch", even))
    assert manager.bind("scale") is scale
    assert manager.resolve("scale") is scale
    assert manager.bind("scale", donate=True) is scale


def test_a_bound_method_is_returned_as_it_was_registered() -> None:
    class Kernels:
        def scale(self, x: Any, factor: Any = 2) -> Any:
            return x

    fn = Kernels().scale
    assert make_manager(make_impl("vendor.acme", fn)).bind("scale") is fn


def test_guards_behind_the_winner_do_not_matter() -> None:
    manager = make_manager(
        make_impl("vendor.acme"), make_impl("reference.torch", supports=even, mutates=("x",))
    )
    assert manager.bind("scale") is scale


def test_an_op_without_facts_has_its_layer_guards_answered_by_bind() -> None:
    guard = lambda facts: not facts  # noqa: E731  (asked with an empty mapping)
    manager = make_manager(make_impl("vendor.acme", supports_layer=guard))
    assert manager.bind("scale") is scale
    refused = make_manager(
        make_impl("vendor.acme", supports_layer=lambda facts: "never"),
        make_impl("reference.torch", returning("reference")),
    )
    assert refused.call("scale", 1) == "reference"


def test_an_undeclared_op_can_be_bound_with_any_facts() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports_layer=small), make_impl("reference.torch", returning(0)),
        signatures=(),
    )  # fmt: skip
    assert manager.bind("scale", size=9) is scale
    assert manager.bind("scale", size=10)(1) == 0


# ------------------------------------------------------------------ guards of a layer


def guarded_by_layer() -> Any:
    return make_manager(
        make_impl("vendor.acme", supports_layer=small),
        make_impl("reference.torch", returning("reference")),
        signatures=[SIZED],
    )


def test_with_all_facts_layer_guards_are_answered_when_binding() -> None:
    manager = guarded_by_layer()
    assert manager.bind("scale", size=9, factor=2) is scale
    assert manager.bind("scale", size=10, factor=2)(1) == "reference"
    # Answered for the layer: what a later call brings is not looked at.
    assert manager.bind("scale", size=9, factor=2)(100) == 200


@pytest.mark.parametrize("facts", [{}, {"size": 9}, {"factor": 2}])
def test_with_some_facts_or_none_layer_guards_are_asked_at_each_call(
    facts: dict[str, Any],
) -> None:
    fn = guarded_by_layer().bind("scale", **facts)
    assert [fn(9), fn(10), fn(x=8, factor=3)] == [18, "reference", 24]


def test_an_unknown_fact_is_a_type_error_with_the_valid_ones() -> None:
    with pytest.raises(TypeError) as caught:
        guarded_by_layer().bind("scale", siez=9, factor=2)
    assert str(caught.value) == (
        "bind('scale'): unknown fact 'siez'; valid: size, factor. Did you mean \"size\"?"
    )
    with pytest.raises(TypeError) as caught:
        make_manager(make_impl("vendor.acme")).bind("scale", size=9)
    assert str(caught.value) == "bind('scale'): unknown fact 'size'; valid: none."


def test_both_guards_are_asked_and_the_layer_guard_comes_first() -> None:
    asked: list[str] = []

    def layer(facts: Mapping[str, Any]) -> bool | str:
        asked.append("layer")
        return small(facts)

    def call(x: Any, factor: Any = 2) -> bool | str:
        asked.append("call")
        return even(x)

    manager = make_manager(
        make_impl("vendor.acme", supports_layer=layer, supports=call),
        make_impl("reference.torch", returning("reference")),
        signatures=[SIZED],
    )
    fn = manager.bind("scale")
    assert (fn(8), asked) == (16, ["layer", "call"])
    asked.clear()
    assert (fn(12), asked) == ("reference", ["layer"])
    asked.clear()
    known = manager.bind("scale", size=8, factor=2)
    assert asked == ["layer"]
    assert (known(7), asked) == ("reference", ["layer", "call"])


# ------------------------------------------------------------------ guards of a call


def test_a_refused_call_goes_to_the_next_candidate_before_anything_ran() -> None:
    ran: list[str] = []

    def first(x: Any, factor: Any = 2) -> Any:
        ran.append("first")

    def second(x: Any, factor: Any = 2) -> Any:
        ran.append("second")

    manager = make_manager(
        make_impl("vendor.acme", first, supports=even),
        make_impl("vendor.other", second, supports=lambda x, factor=2: x > 4),
        make_impl("reference.torch", returning("reference")),
    )
    fn = manager.bind("scale")
    fn(2)
    fn(5)
    assert ran == ["first", "second"]
    assert fn(3) == "reference"
    assert ran == ["first", "second"]
    assert manager.get_selected_impl_id("scale") == "vendor.acme"


def test_the_reasons_of_refused_calls_are_kept_each_once_and_not_without_end() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=even), make_impl("reference.torch", returning(0))
    )
    binding = manager.bind_op("scale")
    for x in (1, 2, 1, 3):
        binding.fn(x)
    assert binding.call_rejections == {"vendor.acme": ["1 is odd", "3 is odd"]}
    for x in range(1001):
        binding.fn(x)
    assert len(binding.call_rejections["vendor.acme"]) == 8


def test_a_call_that_everybody_refuses_lists_the_reasons_of_this_call() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=even),
        make_impl("vendor.gone", available=lambda: "no driver"),
        make_impl("reference.torch", supports=lambda x, factor=2: x > 2 or f"{x} is small"),
    )
    fn = manager.bind("scale")
    assert fn(5) == 10
    with pytest.raises(NoImplementationError) as caught:
        fn(1, factor=3)
    assert str(caught.value) == (
        "op 'scale': every implementation refuses this call (1, factor=3): vendor.acme: 1 is odd; "
        "reference.torch: 1 is small; vendor.gone: no driver"
    )
    assert not hasattr(caught.value, "__notes__")


def test_a_guard_that_raises_stops_the_call_and_is_named() -> None:
    def guard(x: Any, factor: Any = 2) -> bool:
        return bool(x.size())

    manager = make_manager(
        make_impl("vendor.acme", supports=guard), make_impl("reference.torch", returning(0))
    )
    for call in (manager.bind("scale"), lambda x: manager.call("scale", x)):
        with pytest.raises(AttributeError) as caught:
            call(1)
        line = guard.__code__.co_firstlineno + 1
        assert caught.value.__notes__ == [
            "vllm_fl: raised by a guard of implementation 'vendor.acme' of op 'scale' (guard in "
            f"test_binding.py, line {line}), asked about 1. A guard reads metadata only, and "
            "returns True or a reason."
        ]


def test_a_second_guard_that_forgets_to_return_is_named() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=even),
        make_impl("reference.torch", supports=lambda x, factor=2: None),
    )
    with pytest.raises(TypeError, match="this one returned None") as caught:
        manager.call("scale", 1)
    assert "a guard of implementation 'reference.torch'" in caught.value.__notes__[0]


# --------------------------------------------------------------------------------- strict


def test_under_strict_a_refused_call_is_an_error() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=even), make_impl("reference.torch"), strict=True
    )
    fn = manager.bind("scale")
    assert fn(2) == 4
    with pytest.raises(GuardRejected) as caught:
        fn(1)
    assert str(caught.value) == (
        "op 'scale', strict mode: the first choice 'vendor.acme' refuses this call: 1 is odd. "
        "Choose another implementation for scale, or leave strict mode."
    )


def test_under_strict_a_refused_layer_is_an_error() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports_layer=small), make_impl("reference.torch"),
        signatures=[SIZED], strict=True,
    )  # fmt: skip
    with pytest.raises(GuardRejected) as caught:
        manager.bind("scale", size=10, factor=2)
    assert str(caught.value) == (
        "op 'scale', strict mode: the first choice 'vendor.acme' refuses: size 10 is not below "
        "10. Choose another implementation for scale, or leave strict mode."
    )
    with pytest.raises(GuardRejected, match="refuses this call: size 10 is not below 10"):
        manager.call("scale", 10)


def test_under_strict_a_refusal_behind_the_first_choice_is_none_of_its_business() -> None:
    manager = make_manager(
        make_impl("vendor.acme"), make_impl("reference.torch", supports_layer=small),
        signatures=[SIZED], strict=True,
    )  # fmt: skip
    assert manager.bind("scale", size=10, factor=2) is scale


# -------------------------------------------------------------------- what raises, raises


class _Boom(Exception):
    pass


def explode(x: Any, factor: Any = 2) -> Any:
    x.value = -1
    raise _Boom("kernel failed")


NOTE = (
    "vllm_fl: raised by implementation 'vendor.acme' of op 'scale', called with float32[2, 8] "
    "strides [8, 1], factor=3. No other implementation was tried, because the arguments may "
    "already be overwritten. If this is a case that it does not handle, its `supports` guard "
    "should refuse it."
)


@pytest.mark.parametrize("guard", [None, lambda x, factor=2: True])
def test_an_exception_propagates_with_a_note_and_nothing_else_runs(guard: Any) -> None:
    ran: list[int] = []

    def fallback(x: Any, factor: Any = 2) -> None:
        ran.append(1)

    manager = make_manager(
        make_impl("vendor.acme", explode, supports=guard), make_impl("reference.torch", fallback)
    )
    for _ in range(2):  # it changes no later selection
        with pytest.raises(_Boom) as caught:
            manager.call("scale", Buffer(1), factor=3)
        assert str(caught.value) == "kernel failed"
        assert caught.value.__notes__ == [NOTE]
        assert manager.get_selected_impl_id("scale") == "vendor.acme"
    assert ran == []


def test_an_exception_from_the_second_candidate_names_the_second() -> None:
    manager = make_manager(
        make_impl("vendor.first", supports=lambda x, factor=2: False),
        make_impl("vendor.second", explode),
    )
    with pytest.raises(_Boom) as caught:
        manager.call("scale", Buffer(1))
    assert len(caught.value.__notes__) == 1
    assert "implementation 'vendor.second' of op 'scale'" in caught.value.__notes__[0]


def test_call_op_adds_the_same_note() -> None:
    registry = get_default_manager().registry
    registry.register_impl(make_impl("vendor.acme", explode))
    with pytest.raises(_Boom) as caught:
        call_op("scale", Buffer(1), factor=3)
    assert caught.value.__notes__ == [NOTE]


def test_an_op_that_calls_an_op_is_noted_once_for_the_inner_one() -> None:
    manager = make_manager(make_impl("vendor.acme", explode))

    def outer(x: Any) -> Any:
        return manager.call("scale", x, factor=3)

    manager.registry.register_impl(make_impl("vendor.outer", outer, op_name="outer"))
    with pytest.raises(_Boom) as caught:
        manager.call("outer", Buffer(1))
    assert caught.value.__notes__ == [NOTE]


def test_arguments_are_described_shortly_and_never_in_the_way_of_the_exception() -> None:
    class Sparse:
        shape = (3,)
        dtype = "torch.int8"

        def stride(self) -> tuple[int, ...]:
            raise RuntimeError("sparse tensors do not have strides")

    class Plain:
        shape = (2, 2)

    def fail(*args: Any) -> Any:
        raise _Boom

    manager = make_manager(make_impl("vendor.acme", fail, op_name="f"))
    with pytest.raises(_Boom) as caught:
        manager.call("f", Sparse(), Plain(), None, 1e-6, "y" * 50, [1, 2])
    told = caught.value.__notes__[0].partition("called with ")[2].partition(". No other")[0]
    assert told == f"Sparse, [2, 2], None, 1e-06, '{'y' * 36}..., [1, 2]"
    with pytest.raises(_Boom) as caught:
        manager.call("f")
    assert "called with no arguments. No other" in caught.value.__notes__[0]


# ------------------------------------------------------------------------------- in place

ADD = OpSignature.parse("add(x, y, scale=None)", inplace=("x", "y"))


def add_in_place(x: Buffer, y: Buffer | None, scale: Buffer | None = None) -> tuple[Any, ...]:
    if y is not None:
        x.value += y.value
        y.value = 0
    if scale is not None:
        x.value *= scale.value
        scale.value = 0
    return x, y, scale


IN_PLACE = make_impl("vendor.acme", add_in_place, op_name="add", mutates=("x", "y", "scale"))


def adding(*more: OpImpl) -> Any:
    return make_manager(IN_PLACE, *more, signatures=[ADD])


def test_without_donation_what_an_in_place_winner_writes_is_cloned() -> None:
    manager = adding()
    x, y, s = Buffer(1), Buffer(2), Buffer(3)
    for fn in (manager.bind("add"), manager.resolve("add"), lambda *a: manager.call("add", *a)):
        out = fn(x, y, s)
        assert [b.value for b in out] == [9, 0, 0]
        assert (x.value, y.value, s.value) == (1, 2, 3)


def test_with_donation_the_function_itself_writes_the_callers_arguments() -> None:
    fn = adding().bind("add", donate=True)
    assert fn is add_in_place
    x, y = Buffer(1), Buffer(2)
    out = fn(x, y)
    assert out[0] is x
    assert (x.value, y.value) == (3, 0)


def test_keyword_arguments_are_cloned_and_the_callers_mapping_is_left_alone() -> None:
    x, y = Buffer(1), Buffer(2)
    arguments = {"y": y, "scale": Buffer(5)}
    out = adding().bind("add")(x, **arguments)
    assert out[0].value == 15
    assert (x.value, y.value, arguments["scale"].value) == (1, 2, 5)
    assert arguments["y"] is y


def test_none_and_left_out_arguments_are_not_cloned() -> None:
    x = Buffer(1)
    fn = adding().bind("add")
    assert [b and b.value for b in fn(x, None)] == [1, None, None]
    assert [b and b.value for b in fn(x, y=None, scale=Buffer(4))] == [4, None, 0]
    assert x.value == 1


def test_the_same_tensor_given_twice_is_cloned_twice() -> None:
    x = Buffer(3)
    out = adding().bind("add")(x, x)
    assert [b and b.value for b in out] == [6, 0, None]
    assert x.value == 3


def test_arguments_that_are_not_written_are_passed_on_as_they_are() -> None:
    seen: list[Any] = []

    def fn(x: Any, y: Any, scale: Any = None) -> None:
        seen.extend([x, y])

    manager = make_manager(
        make_impl("vendor.acme", fn, op_name="add", mutates=("x",)), signatures=[ADD]
    )
    x, y = Buffer(1), Buffer(2)
    manager.call("add", x, y)
    assert seen[0] is not x
    assert seen[1] is y


def test_clones_are_made_for_an_undeclared_op_too() -> None:
    manager = make_manager(IN_PLACE, signatures=())
    x = Buffer(1)
    assert manager.call("add", x, Buffer(2))[0].value == 3
    assert x.value == 1


def test_a_refused_in_place_winner_clones_nothing_and_its_follower_decides_for_itself() -> None:
    class Precious(Buffer):
        def clone(self) -> Buffer:
            raise AssertionError("cloned for an implementation that does not write")

    def functional(x: Any, y: Any, scale: Any = None) -> Any:
        return x

    manager = make_manager(
        make_impl(
            "vendor.acme", add_in_place, op_name="add", mutates=("x", "y"),
            supports=lambda x, y, scale=None: "refused",
        ),
        make_impl("reference.torch", functional, op_name="add"),
        signatures=[ADD],
    )  # fmt: skip
    x = Precious(1)
    assert manager.call("add", x, Precious(2)) is x


def test_a_cloning_function_keeps_the_name_and_text_of_the_implementation() -> None:
    fn = adding().bind("add")
    assert fn is not add_in_place
    assert fn.__name__ == "add_in_place"


# -------------------------------------------------------------------------------- loading


class _Loads(Backend):
    vendor = "acme"

    def __init__(self, impl_id: str, error: Exception | None = None) -> None:
        type(self).impl_id = impl_id
        super().__init__()
        self.error, self.loads = error, 0

    def load(self) -> None:
        self.loads += 1
        if self.error is not None:
            raise self.error

    def scale(self, x: Any, factor: Any = 2) -> Any:
        return type(self).__name__


def test_a_backend_is_loaded_once_when_its_op_is_first_bound_and_not_before() -> None:
    backend = _Loads("vendor.acme")
    manager = make_manager(
        make_impl("vendor.acme", backend.scale),
        make_impl("vendor.acme", backend.scale, op_name="shift"),
    )
    manager.explain("scale")
    manager.explain("scale", 1)
    assert backend.loads == 0
    manager.bind("scale")
    manager.bind("scale")
    manager.call("shift", 1)
    assert backend.loads == 1


def test_a_backend_that_no_call_can_reach_is_not_loaded() -> None:
    behind = _Loads("vendor.behind")
    manager = make_manager(
        make_impl("default.flaggems", supports=even),
        make_impl("vendor.acme", returning("acme")),
        make_impl("vendor.behind", behind.scale),
    )
    assert manager.call("scale", 1) == "acme"
    assert behind.loads == 0
    manager.registry.unregister("scale", "vendor.acme")
    manager.bind("scale")
    assert behind.loads == 1  # now a refused call gets to it


def test_a_backend_that_fails_to_load_is_followed_by_the_next_and_tried_once(
    log: list[str],
) -> None:
    broken = _Loads("vendor.broken", ImportError("libacme.so: cannot open"))
    manager = make_manager(
        make_impl("vendor.broken", broken.scale),
        make_impl("vendor.broken", broken.scale, op_name="shift"),
        make_impl("reference.torch"),
        make_impl("reference.torch", op_name="shift"),
    )
    assert manager.get_selected_impl_id("scale") == "vendor.broken"
    assert manager.bind("scale") is scale
    assert manager.bind("shift") is scale
    assert broken.loads == 1
    assert manager.get_selected_impl_id("shift") == "reference.torch"
    decision = manager.explain("scale")
    assert [(loser.impl_id, loser.code, loser.reason) for loser in decision.losers] == [
        (
            "vendor.broken",
            "load_error",
            "loading it raised ImportError: libacme.so: cannot open",
        )
    ]
    assert [line for line in log if not line.startswith("INFO")] == [
        "WARNING vendor.broken cannot be used: loading it raised ImportError: libacme.so: cannot "
        "open"
    ]


def test_where_nothing_can_be_loaded_the_error_says_so() -> None:
    broken = _Loads("vendor.broken", ImportError("x"))
    manager = make_manager(make_impl("vendor.broken", broken.scale))
    with pytest.raises(NoImplementationError) as caught:
        manager.call("scale", 1)
    assert str(caught.value) == (
        "op 'scale': no implementation can be used on cpu\n"
        "  vendor.broken: loading it raised ImportError: x"
    )


def test_a_call_can_reach_the_candidates_up_to_the_first_without_a_guard_to_ask() -> None:
    by_call, by_layer, plain = (
        make_impl("vendor.a", supports=even),
        make_impl("vendor.b", supports_layer=small),
        make_impl("vendor.c"),
    )
    chain = (by_call, by_layer, plain, plain)
    assert reachable(chain, facts_known=False) == (by_call, by_layer, plain)
    assert reachable(chain, facts_known=True) == (by_call, by_layer)
    assert reachable((by_call,), facts_known=True) == (by_call,)


# ------------------------------------------------------------------------ native, tracing


def test_a_layer_may_get_native_whose_function_only_explains_itself() -> None:
    manager = make_manager(make_impl("vendor.acme"), per_op_order={"scale": ["native"]})
    binding = manager.bind_op("scale", layer=True)
    assert binding.decision.native
    with pytest.raises(NoImplementationError, match=r"^native was chosen: call vLLM's own forward"):
        binding.fn(1)
    assert manager.bind("scale") is scale  # a library's call has no forward of vLLM's


def test_a_traced_callable_tells_who_is_called_and_the_plain_one_stays_plain() -> None:
    manager = make_manager(
        make_impl("vendor.acme", supports=even), make_impl("reference.torch", returning("r"))
    )
    binding = manager.bind_op("scale")
    told: list[str] = []
    assert binding.traced is not None
    traced = binding.traced(lambda impl: told.append(impl.impl_id))
    assert [traced(2), traced(3), binding.fn(2)] == [4, "r", 4]
    assert told == ["vendor.acme", "reference.torch"]


def test_a_declaration_without_facts_is_bound_like_any_other() -> None:
    manager = make_manager(make_impl("vendor.acme", supports=even), signatures=[SCALE])
    assert manager.bind("scale")(4) == 8


# ------------------------------------------------------------- arguments that no op takes


def _supports_scale(x: Any, factor: Any = 2) -> bool:
    return True


@pytest.mark.parametrize("options", [{}, {"supports": _supports_scale}], ids=["bare", "guarded"])
@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing a required argument: 'x'; called with ()"),
        ((1,), {"shift": 2}, "got an unexpected keyword argument 'shift'; called with (int, shift"),
    ],
)
def test_a_call_with_arguments_that_the_op_does_not_take_names_the_op(
    monkeypatch, options: Any, args: Any, kwargs: Any, problem: str
) -> None:
    manager = make_manager(make_impl("vendor.acme", **options))
    monkeypatch.setattr(default._default, "manager", manager)
    for call in (manager.call, call_op):
        with pytest.raises(TypeError) as caught:
            call("scale", *args, **kwargs)
        assert str(caught.value).startswith(f"op scale(x, factor=2): {problem}")
        assert not hasattr(caught.value, "__notes__")  # nobody's guard raised it
    if args or kwargs:
        with pytest.raises(TypeError, match=r"^op scale\(x, factor=2\): got an unexpected"):
            manager.explain("scale", *args, **kwargs)


def test_a_type_error_of_an_implementation_stays_its_own() -> None:
    def scale(x: Any, factor: Any = 2) -> Any:
        return len(factor)

    manager = make_manager(make_impl("vendor.acme", scale, supports=_supports_scale))
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len") as caught:
        manager.call("scale", 1)
    assert "raised by implementation 'vendor.acme' of op 'scale'" in caught.value.__notes__[0]
