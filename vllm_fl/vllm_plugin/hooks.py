# SPDX-License-Identifier: Apache-2.0
"""Every place where vllm_fl touches vLLM: named, listed, reversible."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..dispatch.log import logger

__all__ = [
    "Hook",
    "awaited",
    "install",
    "installed",
    "uninstall",
    "uninstall_all",
    "when_imported",
]

_MISSING = object()


@dataclass(slots=True)
class Hook:
    """One attribute of vLLM that was set or replaced.

    Attributes:
        name: "module.Class.attribute", for people.
        purpose: why.
        owner: the object whose attribute it is.
        attribute: its name.
        original: what was there, or a marker that nothing was.
        replacement: what is there now.
    """

    name: str
    purpose: str
    owner: Any
    attribute: str
    original: Any
    replacement: Any

    @property
    def in_place(self) -> bool:
        """Whether the replacement is still there; False if somebody replaced it since."""
        return _own(self.owner, self.attribute) is self.replacement

    @property
    def taken_out(self) -> bool:
        """Whether somebody put the original back."""
        return _own(self.owner, self.attribute) is self.original

    def remove(self) -> None:
        """Put the original back."""
        if self.original is _MISSING:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


_hooks: dict[str, Hook] = {}
_awaited: dict[str, list[Callable[[ModuleType], None]]] = {}
_executing: dict[str, ModuleType] = {}
"""Of the awaited modules those whose import had begun before anybody awaited them."""


def _own(owner: Any, attribute: str) -> Any:
    return vars(owner).get(attribute, _MISSING)


def install(owner: Any, attribute: str, make: Callable[[Any], Any], *, purpose: str) -> Hook:
    """Replace ``owner.attribute`` by ``make(the present value or None)``, once.

    Where somebody else has replaced it since, it is not replaced again: theirs will call ours.

    Args:
        owner: a module or class; the attribute is looked up on itself, not on its bases.
    """
    name = f"{_name(owner)}.{attribute}"
    if name in _hooks and not _hooks[name].taken_out:
        return _hooks[name]
    original = _own(owner, attribute)
    for hook in _hooks.values():
        if hook.replacement is original:  # imported by name from where it was replaced already
            original = hook.original
    replacement = make(None if original is _MISSING else original)
    setattr(owner, attribute, replacement)
    hook = _hooks[name] = Hook(name, purpose, owner, attribute, original, replacement)
    return hook


def _name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def installed() -> tuple[Hook, ...]:
    """The hooks of this process, in the order in which they were set."""
    return tuple(_hooks.values())


def when_imported(module_name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` now, or as soon as somebody imports the module.

    Importing vLLM's layers takes seconds, and the processes without a model never do.
    """
    _catch_up()
    module = sys.modules.get(module_name)
    if module is not None and not _is_executing(module):
        act(module)
        return
    if module is not None and module_name not in _awaited:
        _executing[module_name] = module
    acts = _awaited.setdefault(module_name, [])
    if act not in acts:
        acts.append(act)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _is_executing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _catch_up() -> None:
    """Act on the modules that no finder was asked for, and that have been executed since."""
    for name, module in list(_executing.items()):
        if not _is_executing(module):
            _executing.pop(name, None)
            if sys.modules.get(name) is module:  # else its import failed
                for act in _awaited.pop(name, ()):
                    act(module)


def awaited() -> tuple[str, ...]:
    """The modules that are hooked when somebody imports them."""
    return tuple(_awaited)


class _Finder:
    """Finds the awaited modules as Python does, and acts when they have been executed."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _executing:
            _catch_up()
        spec = PathFinder.find_spec(name, path, target) if name in _awaited else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in _awaited.pop(name, ()):
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def uninstall_all() -> None:
    """Take every hook back, the last first, and wait for no module any more.

    A hook that somebody else replaced since stays, and stays listed: what they put there
    probably calls it.
    """
    _awaited.clear()
    _executing.clear()
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
    for hook in reversed(list(_hooks.values())):
        uninstall(hook)


def uninstall(hook: Hook) -> None:
    """Take one hook back, as `uninstall_all` does."""
    if hook.in_place:
        hook.remove()
    elif not hook.taken_out:
        logger.warning("%s was replaced by somebody else; left as it is", hook.name)
        return
    if _hooks.get(hook.name) is hook:
        del _hooks[hook.name]
