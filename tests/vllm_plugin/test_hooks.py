# SPDX-License-Identifier: Apache-2.0
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm_fl.vllm_plugin import hooks
from vllm_fl.vllm_plugin.hooks import (
    awaited,
    install,
    installed,
    uninstall,
    uninstall_all,
    when_imported,
)


class Base:
    def method(self) -> str:
        return "base"


class Owner(Base):
    def own(self) -> str:
        return "own"


@pytest.fixture
def owner() -> Iterator[type]:
    """A class with an own method and an inherited one."""
    before = dict(vars(Owner))
    yield Owner
    assert dict(vars(Owner)) == before


def louder(original):
    return lambda self: f"{original(self)}!"


def test_install_replaces_the_attribute_by_what_make_returns(owner) -> None:
    hook = install(owner, "own", louder, purpose="to be heard")
    assert owner().own() == "own!"
    assert hook.name == f"{__name__}.Owner.own"
    assert hook.purpose == "to be heard"
    assert hook.in_place
    uninstall_all()


def test_uninstall_puts_the_very_same_object_back(owner) -> None:
    before = vars(owner)["own"]
    install(owner, "own", louder, purpose="")
    uninstall_all()
    assert vars(owner)["own"] is before
    assert installed() == ()


def test_an_inherited_attribute_is_hooked_on_the_class_alone_and_inherited_again_afterwards(
    owner,
) -> None:
    given = []
    install(owner, "method", lambda original: given.append(original) or (lambda self: "hook"),
            purpose="")  # fmt: skip
    assert given == [None]  # what a base has is not taken for the class's own
    assert (owner().method(), Base().method()) == ("hook", "base")
    uninstall_all()
    assert "method" not in vars(owner)
    assert owner().method() == "base"


def test_an_attribute_that_nothing_had_is_gone_again_afterwards(owner) -> None:
    install(owner, "new", lambda original: lambda self: original, purpose="")
    assert owner().new() is None
    uninstall_all()
    assert not hasattr(owner, "new")


def test_a_module_can_be_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some.module")
    module.answer = 42
    hook = install(module, "answer", lambda original: original + 1, purpose="")
    assert (hook.name, module.answer) == ("some.module.answer", 43)
    uninstall_all()
    assert module.answer == 42


def test_installing_twice_wraps_once(owner) -> None:
    first = install(owner, "own", louder, purpose="")
    assert install(owner, "own", louder, purpose="") is first
    assert owner().own() == "own!"
    uninstall_all()


def test_what_somebody_else_wrapped_is_not_wrapped_again(owner) -> None:
    before = owner.own
    ours = install(owner, "own", louder, purpose="")
    wrapped = owner.own
    owner.own = lambda self: f"({wrapped(self)})"
    assert not ours.in_place
    assert install(owner, "own", louder, purpose="") is ours
    assert owner().own() == "(own!)"
    owner.own = wrapped
    uninstall_all()
    assert owner.own is before


def test_what_somebody_else_wrapped_is_left_as_it_is_and_stays_listed(owner, log) -> None:
    ours = install(owner, "own", louder, purpose="")
    wrapped = owner.own
    owner.own = theirs = lambda self: f"({wrapped(self)})"
    uninstall_all()
    assert owner.own is theirs
    assert log == [f"WARNING {ours.name} was replaced by somebody else; left as it is"]
    assert installed() == (ours,)  # it still runs
    owner.own = wrapped
    uninstall_all()
    assert installed() == ()


def test_a_hook_that_somebody_took_out_can_be_set_again(owner, log) -> None:
    before = owner.own
    first = install(owner, "own", louder, purpose="")
    owner.own = before
    assert (first.in_place, first.taken_out) == (False, True)
    second = install(owner, "own", louder, purpose="")
    assert second is not first
    assert (owner().own(), installed()) == ("own!", (second,))
    owner.own = before
    uninstall_all()
    assert (installed(), log) == ((), [])  # nothing of ours was left


def test_hooks_are_listed_in_the_order_in_which_they_were_set_and_taken_back_the_last_first(
    owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked = [install(owner, name, louder, purpose="") for name in ("own", "third", "fourth")]
    assert installed() == tuple(hooked)
    removed = []
    monkeypatch.setattr(hooks.Hook, "remove", lambda self: removed.append(self))
    with monkeypatch.context():
        uninstall_all()
    assert removed == hooked[::-1]
    monkeypatch.undo()
    for hook in hooked:
        hook.remove()


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported yet."""
    (tmp_path / "a_late_module.py").write_text("value = 1\nfrom json import dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "a_late_module"
    sys.modules.pop("a_late_module", None)
    uninstall_all()
    assert sys.meta_path == finders


def test_a_module_that_is_there_is_acted_on_at_once() -> None:
    seen: list[ModuleType] = []
    when_imported("json", seen.append)
    assert seen == [sys.modules["json"]]
    assert awaited() == ()


def test_a_module_that_is_not_there_is_acted_on_when_it_was_executed(waiting: str) -> None:
    values: list[int] = []
    when_imported(waiting, lambda module: values.append(module.value))
    assert (values, awaited()) == ([], (waiting,))
    assert waiting not in sys.modules
    importlib.import_module(waiting)
    assert (values, awaited()) == ([1], ())
    importlib.reload(sys.modules[waiting])
    assert values == [1]


def test_a_module_that_is_being_executed_is_acted_on_when_it_was(tmp_path, monkeypatch) -> None:
    """Nobody asks a finder for it any more; the next import finds it done."""
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    act = lambda module: seen.append(module.last)  # noqa: E731
    monkeypatch.setattr("builtins.vllm_fl_test_act", act, raising=False)
    (tmp_path / "half_done_fl.py").write_text(
        "import builtins\n"
        "from vllm_fl.vllm_plugin.hooks import when_imported\n"
        "when_imported(__name__, builtins.vllm_fl_test_act)\n"
        "last = 'executed'\n"
    )
    (tmp_path / "another_fl.py").write_text("")
    importlib.import_module("half_done_fl")
    assert seen == []
    importlib.import_module("another_fl")
    assert seen == ["executed"]
    assert "half_done_fl" not in awaited()
    for name in ("half_done_fl", "another_fl"):
        del sys.modules[name]
    uninstall_all()


def test_waiting_twice_acts_once(waiting: str) -> None:
    seen: list[ModuleType] = []
    when_imported(waiting, seen.append)
    when_imported(waiting, seen.append)
    importlib.import_module(waiting)
    assert len(seen) == 1


def test_looking_for_a_module_without_importing_it_loses_nothing(waiting: str) -> None:
    seen: list[ModuleType] = []
    when_imported(waiting, seen.append)
    spec = importlib.util.find_spec(waiting)
    assert spec is not None
    assert spec.origin is not None
    assert (seen, awaited()) == ([], (waiting,))
    importlib.import_module(waiting)
    assert len(seen) == 1


def test_a_module_that_does_not_exist_is_missed_as_ever() -> None:
    when_imported("a_module_that_nobody_has", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        importlib.import_module("a_module_that_nobody_has")
    uninstall_all()


def test_uninstall_stops_waiting(waiting: str) -> None:
    seen: list[ModuleType] = []
    when_imported(waiting, seen.append)
    uninstall_all()
    assert awaited() == ()
    importlib.import_module(waiting)
    assert seen == []


def test_two_who_wait_for_one_module_both_act_in_their_order(waiting: str) -> None:
    seen: list[str] = []
    when_imported(waiting, lambda module: seen.append("first"))
    when_imported(waiting, lambda module: seen.append("second"))
    importlib.import_module(waiting)
    assert seen == ["first", "second"]


def test_a_copy_that_was_imported_by_name_is_hooked_and_put_back_as_the_original() -> None:
    there, here = ModuleType("there"), ModuleType("here")
    original = there.act = lambda: 1
    install(there, "act", lambda _: replacement, purpose="")
    here.act = there.act  # from there import act
    given = []
    install(here, "act", lambda present: given.append(present) or replacement, purpose="")
    assert given == [original]
    uninstall_all()
    assert (there.act, here.act) == (original, original)


def replacement() -> int:
    return 2


def test_one_hook_is_taken_back_alone(owner) -> None:
    first = install(owner, "own", louder, purpose="")
    second = install(owner, "method", lambda _: lambda self: "hook", purpose="")
    uninstall(first)
    assert installed() == (second,)
    assert (owner().own(), owner().method()) == ("own", "hook")
    uninstall(second)
    assert installed() == ()


def test_one_hook_that_somebody_replaced_stays_listed(owner) -> None:
    hook = install(owner, "own", louder, purpose="")
    owner.own = lambda self: "theirs"
    uninstall(hook)
    assert installed() == (hook,)
    owner.own = hook.replacement
    uninstall(hook)
