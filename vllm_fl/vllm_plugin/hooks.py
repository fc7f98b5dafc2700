# SPDX-License-Identifier: Apache-2.0
"""Every place where vllm_fl touches vLLM: named, listed, reversible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..dispatch.log import logger

__all__ = ["Hook", "install", "installed", "uninstall_all"]

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

    def remove(self) -> None:
        """Put the original back, unless somebody else replaced ours since."""
        if not self.in_place:
            logger.warning("%s was replaced by somebody else; left as it is", self.name)
        elif self.original is _MISSING:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


_hooks: dict[str, Hook] = {}


def _own(owner: Any, attribute: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(attribute, _MISSING)
    return vars(owner).get(attribute, _MISSING)


def install(owner: Any, attribute: str, make: Callable[[Any], Any], *, purpose: str) -> Hook:
    """Replace ``owner.attribute`` by ``make(the present value or None)``, once.

    Args:
        owner: a module or class; the attribute is looked up on itself, not on its bases.
    """
    name = f"{getattr(owner, '__module__', '')}.{owner.__qualname__}.{attribute}"
    if name in _hooks and _hooks[name].in_place:
        return _hooks[name]
    original = _own(owner, attribute)
    replacement = make(None if original is _MISSING else original)
    setattr(owner, attribute, replacement)
    hook = _hooks[name] = Hook(name, purpose, owner, attribute, original, replacement)
    return hook


def installed() -> tuple[Hook, ...]:
    """The hooks of this process, in the order in which they were set."""
    return tuple(_hooks.values())


def uninstall_all() -> None:
    """Take every hook back, the last first."""
    for name in reversed(list(_hooks)):
        _hooks.pop(name).remove()
