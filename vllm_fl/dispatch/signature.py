# SPDX-License-Identifier: Apache-2.0
"""OpSignature: the torch-free half of an op's contract, and the check of a function against it."""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import RegistrationError, SignatureMismatchError, did_you_mean

__all__ = ["REQUIRED", "OpSignature", "Parameter"]


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
        fuses: the ops that it does in one. vLLM calls those one by one, so this one has to be
            worth it; see `vllm_fl.dispatch.fusion`.
        summary: one line for people.
    """

    op_name: str
    parameters: tuple[Parameter, ...]
    inplace: tuple[str, ...] = ()
    facts: Callable[..., Mapping[str, Any]] | None = field(default=None, compare=False)
    fact_names: tuple[str, ...] = ()
    selector: bool = False
    fuses: tuple[str, ...] = ()
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
        fuses: tuple[str, ...] = (),
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
            fuses=fuses,
            summary=summary,
        )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameter names in order."""
        return tuple(p.name for p in self.parameters)

    def __str__(self) -> str:
        return f"{self.op_name}({', '.join(map(str, self.parameters))})"

    def has_all_facts(self, facts: Mapping[str, Any] | None) -> bool:
        """Whether the facts suffice to answer layer guards; an op without any has them all.

        Raises:
            TypeError: a fact that the op does not have.
        """
        for name in facts or ():
            if name not in self.fact_names:
                raise TypeError(
                    f"bind('{self.op_name}'): unknown fact {name!r}; valid: "
                    f"{', '.join(self.fact_names) or 'none'}.{did_you_mean(name, self.fact_names)}"
                )
        return self.facts is None or (facts is not None and facts.keys() >= {*self.fact_names})

    def facts_of(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """The facts of a call's arguments; reads metadata only.

        Raises:
            TypeError: the arguments are not those of the op.
        """
        if self.facts is None:
            return {}
        try:
            return self.facts(*args, **kwargs)
        except TypeError:
            self.check_arguments(args, kwargs)
            raise

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments that the op does not take. It takes microseconds: no call waits for
        it, only an error that may come from them.

        Raises:
            TypeError: what is missing or too much, with the op's signature and what was given.
        """
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter(
                p.name,
                kind,
                default=inspect.Parameter.empty if p.default is REQUIRED else p.default,
            )
            for p in self.parameters
        ]
        try:
            inspect.Signature(parameters).bind(*args, **kwargs)
        except TypeError as error:
            given = [type(a).__name__ for a in args]
            given += [f"{name}={type(a).__name__}" for name, a in kwargs.items()]
            raise TypeError(f"op {self}: {error}; called with ({', '.join(given)})") from None

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
