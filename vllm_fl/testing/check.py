# SPDX-License-Identifier: Apache-2.0
"""One case of one implementation, checked promise by promise. Runs in the child process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..dispatch.types import ACCEPTED, Rejected
from ..ops.arrays import bind_axes, holds
from . import compiled, invariance
from .cases import (
    COMPILE,
    NotApplicable,
    arguments_of,
    base_case,
    cases_of,
    dtype_of,
    named_arguments,
)
from .compare import differences, outputs_of
from .guards import fake_arguments, fake_verdict, verdict_on
from .memory import Placed, fresh_memory_is_nan, place, same_bits, share_memory, synchronize
from .report import CaseResult, Kind
from .target import Dispatcher, Target, device_facts

__all__ = ["Checker"]

Problems = list[tuple[Kind, str]]


class Checker:
    """Checks cases of one implementation; what is costly is made once.

    Args:
        device: where the tensors are, as torch names it.
    """

    def __init__(self, target: Target, device: str) -> None:
        self.target = target
        self.device = device
        self.unavailable: str | None = None
        self.refused: str | None = None
        backend = target.impl.backend
        if backend is not None:
            try:
                backend.load()
            except Exception as error:
                self.unavailable = f"loading it raised {type(error).__name__}: {error}"
        try:
            self.dispatcher = Dispatcher(target, device_facts(device, target.impl))
        except Exception as error:
            self.refused = f"the registry refuses the implementation: {error}"

    def check(self, dtype_name: str, case_name: str) -> CaseResult:
        """Everything that a case promises."""
        start = time.perf_counter()
        problems: Problems = []
        reason = self.unavailable
        if reason is None and self.refused is not None:
            problems.append((Kind.CONTRACT, self.refused))
        elif reason is None:
            try:
                reason = self._check(dtype_of(dtype_name), case_name, problems)
            except NotApplicable as none:
                reason = str(none)
            except _Raised as raised:
                problems.append((Kind.RAISED, str(raised)))
        impl = self.target.impl
        return CaseResult(
            impl.op_name,
            impl.impl_id,
            dtype_name,
            case_name,
            tuple(problems),
            reason,
            time.perf_counter() - start,
            self.device,
        )

    def _check(self, dtype: torch.dtype, case_name: str, problems: Problems) -> str | None:
        """Adds to `problems`; returns why the case does not run, or None."""
        contract = self.target.contract
        if case_name == COMPILE:
            return self._check_compiled(dtype, problems)
        args = arguments_of(contract, cases_of(contract, dtype)[case_name], dtype)
        unfit = self._unfit(args, dtype)
        if unfit is not None:
            problems.append((Kind.CONTRACT, unfit))
            return None
        rejected = self._check_guards(args, problems)
        if rejected is not None:
            self._check_that_the_next_is_reached(args, problems)
            return f"its guard refuses: {rejected}"
        case = _Run(self, dtype, args, problems)
        if case.first():
            case.second()
            if not problems:
                problems += invariance.problems(self.target, args, self.device, case.outputs)
        return None

    def _unfit(self, args: tuple[Any, ...], dtype: torch.dtype) -> str | None:
        """Why the arguments are not those of the contract."""
        contract = self.target.contract
        values = named_arguments(contract, args)
        try:
            axes = {**values, **bind_axes(contract.arrays, values, dtype=dtype)}
        except ValueError as error:
            return f"the case does not fit the contract: {error}"
        broken = [c for c in contract.constraints if not holds(c, axes)]
        return f"the case breaks the contract's constraint {broken[0]}" if broken else None

    def _check_guards(self, args: tuple[Any, ...], problems: Problems) -> str | None:
        """The reason of a refusal, or None."""
        placed = place(args, self.device)
        try:
            said = verdict_on(self.target, placed.args)
        except Exception as error:
            problems.append((Kind.GUARD, f"a guard raised {type(error).__name__}: {error}"))
            return "a guard raised"
        of_fakes = fake_verdict(self.target, placed.args)
        if isinstance(of_fakes, str):
            problems.append((Kind.GUARD, of_fakes))
        elif of_fakes != said:
            problems.append((Kind.GUARD, f"on fake tensors its guards say {of_fakes}, not {said}"))
        names = self.target.contract.signature.parameter_names
        problems += [(Kind.GUARD, f"by a guard, {w}") for w in placed.writes(names, ())]
        return said.reason if isinstance(said, Rejected) else None

    def _check_that_the_next_is_reached(self, args: tuple[Any, ...], problems: Problems) -> None:
        if any(kind is Kind.GUARD for kind, _ in problems):
            return
        name = self.target.contract.name
        try:
            _, reached = self.dispatcher.call(name, place(args, self.device).args)
        except Exception as error:
            text = f"refused, yet dispatching it raised {_described(error)}"
            problems.append((Kind.DISPATCH, text))
            return
        if not reached:
            text = "its guards refuse the call, but the dispatcher ran it all the same"
            problems.append((Kind.DISPATCH, text))

    def _check_compiled(self, dtype: torch.dtype, problems: Problems) -> str | None:
        contract = self.target.contract

        def fits(args: tuple[Any, ...]) -> bool:
            storages = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
            apart = len(set(storages)) == len(storages)
            return apart and verdict_on(self.target, place(args, self.device).args) == ACCEPTED

        try:
            args = base_case(contract, dtype, fits)
        except NotApplicable:
            return "its guards refuse every case that could be compiled"
        problems += compiled.problems(self.target, args, self.device, self.dispatcher)
        return None


class _Raised(Exception):
    """The implementation raised; the text says what and where."""


class _Run:
    """The calls of one case and what they are compared with."""

    def __init__(
        self, checker: Checker, dtype: torch.dtype, args: tuple[Any, ...], problems: Problems
    ) -> None:
        self.checker = checker
        self.target = checker.target
        self.device = checker.device
        self.names = self.target.contract.signature.parameter_names
        self.dtype = dtype
        self.args = args
        self.problems = problems
        self.outputs: tuple[Any, ...] = ()
        self._held: tuple[Any, ...] = ()

    def _add(self, kind: Kind, what: str) -> None:
        self.problems.append((kind, what))

    def _direct(self) -> tuple[Any, Placed]:
        placed = place(self.args, self.device)
        return self._called(self.target.impl.fn, placed), placed

    def _called(self, function: Callable[..., Any], placed: Placed) -> Any:
        try:
            result = function(*placed.args)
            synchronize(self.device)
        except Exception as error:
            raise _Raised(_described(error)) from error
        return result

    def first(self) -> bool:
        """The implementation itself: outputs, memory, values. False: nothing to compare with."""
        result, placed = self._direct()
        for what in placed.writes(self.names, self.target.impl.mutates):
            self._add(Kind.UNDECLARED_WRITE, what)
        expected = self._promised(placed)
        if isinstance(result, tuple) != isinstance(expected, tuple):
            self._add(Kind.OUTPUTS, f"{_form(result)} instead of {_form(expected)}")
            return False
        self.outputs, promised = outputs_of(result), outputs_of(expected)
        if len(self.outputs) != len(promised):
            self._add(Kind.OUTPUTS, f"{len(self.outputs)} outputs instead of {len(promised)}")
            return False
        alike = [
            self._alike(i, output, fake, placed)
            for i, (output, fake) in enumerate(zip(self.outputs, promised, strict=True))
        ]
        if not all(alike):
            return False
        self._check_sharing(placed)
        self._check_declared_writes(placed)
        self._check_values(self.outputs)
        # A second call that writes into these must not change what it is compared with.
        self._held = self.outputs
        self.outputs = tuple(None if o is None else o.detach().clone() for o in self.outputs)
        return True

    def _promised(self, placed: Placed) -> Any:
        with FakeTensorMode() as mode:
            return self.target.contract.fake(*fake_arguments(placed.args, mode))

    def _alike(self, i: int, output: Any, fake: Any, placed: Placed) -> bool:
        """Whether an output is of the kind that the contract's fake promises."""
        nothing = fake is None or (output is None and fake.numel() == 0)
        if nothing and output is None:
            return True
        if not isinstance(output, torch.Tensor):
            self._add(Kind.OUTPUTS, f"output {i} is {_form(output)} instead of a tensor")
            return False
        if nothing:
            self._add(Kind.OUTPUTS, f"output {i} is a tensor instead of None")
            return False
        alike = True
        if output.shape != fake.shape:
            found, wanted = list(output.shape), list(fake.shape)
            self._add(Kind.SHAPE, f"output {i} has shape {found} instead of {wanted}")
            alike = False
        if output.dtype is not fake.dtype:
            self._add(Kind.DTYPE, f"output {i} is {output.dtype} instead of {fake.dtype}")
            alike = False
        if output.device.type != fake.device.type:
            self._add(Kind.OUTPUTS, f"output {i} is on {output.device} instead of {fake.device}")
            alike = False
        if alike:
            self._check_layout(i, output, fake, placed)
        return alike

    def _check_layout(
        self, i: int, output: torch.Tensor, fake: torch.Tensor, placed: Placed
    ) -> None:
        written = self._written_argument(i, placed)
        if written is not None and share_memory(output, written):
            wanted, whose = written.stride(), "as the argument that it is"
        elif not self.target.contract.strided and all(
            a.is_contiguous() for a in placed.args if isinstance(a, torch.Tensor)
        ):
            wanted, whose = _contiguous_strides(output), "contiguous"
        else:
            wanted, whose = fake.stride(), "as the contract's fake"
        if not output.numel():
            return
        # The stride of a dimension of one element leads nowhere.
        found = [s for s, n in zip(output.stride(), output.shape, strict=True) if n > 1]
        if found != [s for s, n in zip(wanted, output.shape, strict=True) if n > 1]:
            text = f"output {i} has strides {list(output.stride())} instead of {list(wanted)}"
            self._add(Kind.LAYOUT, f"{text}, {whose}")

    def _written_argument(self, i: int, placed: Placed) -> torch.Tensor | None:
        """The argument that output `i` may share memory with."""
        inplace = self.target.contract.signature.inplace
        if i >= len(inplace) or inplace[i] not in self.target.impl.mutates:
            return None
        position = self.names.index(inplace[i])
        value = placed.args[position] if position < len(placed.args) else None
        return value if isinstance(value, torch.Tensor) else None

    def _check_sharing(self, placed: Placed) -> None:
        inplace = self.target.contract.signature.inplace
        tensors = [(i, o) for i, o in enumerate(self.outputs) if o is not None and o.numel()]
        for i, output in tensors:
            allowed = inplace[i] if self._written_argument(i, placed) is not None else None
            for name in placed.shared_with(output, self.names):
                if name != allowed:
                    self._add(Kind.ALIAS, f"output {i} shares memory with {name}")
        for i, output in tensors:
            for j, other in tensors[:i]:
                if j < i and share_memory(output, other):
                    self._add(Kind.ALIAS, f"outputs {j} and {i} share memory")

    def _check_declared_writes(self, placed: Placed) -> None:
        for i, (output, name) in enumerate(
            zip(self.outputs, self.target.contract.signature.inplace, strict=False)
        ):
            written = self._written_argument(i, placed)
            if written is None or output is None or same_bits(written, output):
                continue
            text = f"{name} is declared as written, but does not hold output {i} after the call"
            self._add(Kind.MISSING_WRITE, text)

    def _check_values(self, outputs: tuple[Any, ...], kind: Kind = Kind.VALUES) -> bool:
        contract = self.target.contract
        limits = contract.tolerances[self.dtype]
        found = tuple(None if o is None else o.detach().cpu() for o in outputs)
        good = True
        for i, difference in enumerate(differences(contract, found, self.args)):
            limit = limits.for_output(i)
            if not difference.ulps <= limit:
                far = f"{difference.ulps:.4g} ulp from the exact result, limit {limit:g}"
                self._add(kind, f"output {i} is {far} ({difference.text})")
                good = False
        return good

    def second(self) -> None:
        """Once more, through the dispatcher and with fresh memory full of NaN."""
        placed = place(self.args, self.device)
        dispatcher, name = self.checker.dispatcher, self.target.contract.name
        reached: list[bool] = []

        def dispatched(*args: Any) -> Any:
            result, next_one = dispatcher.call(name, args)
            reached.append(next_one)
            return result

        with fresh_memory_is_nan():
            again = outputs_of(self._called(dispatched, placed))
        if reached[0]:
            self._add(Kind.DISPATCH, "its guards accept the call, but the dispatcher ran another")
            return
        if any(_both_share(one, other) for one in self._held for other in again):
            self._add(Kind.ALIAS, "an output shares memory with one of the call before")
        for what in placed.writes(self.names, ()):
            self._add(Kind.UNDECLARED_WRITE, f"by a functional call through the dispatcher, {what}")
        if self._same(again):
            return
        # The dispatcher clones what is written, and a clone of a slice is dense: other bits may
        # be right. Nondeterminism is a difference between two equal calls.
        for _ in range(2):
            repeated, _ = self._direct()
            if not self._same(outputs_of(repeated)):
                text = "two calls with the same arguments gave other bits"
                self._add(Kind.DETERMINISM, text)
                return
        if not any(kind is Kind.VALUES for kind, _ in self.problems):
            self._check_values(again, Kind.UNINITIALIZED)

    def _same(self, others: tuple[Any, ...]) -> bool:
        """Whether two calls agree bit for bit, but for what the contract leaves open."""
        if len(others) != len(self.outputs):
            return False
        if all(map(same_bits, self.outputs, others)):
            return True
        canonical = self.target.contract.canonical
        if canonical is None:
            return False
        here = [
            tuple(None if o is None else o.cpu() for o in outputs)
            for outputs in (self.outputs, others)
        ]
        return all(map(same_bits, *(canonical(outputs, self.args) for outputs in here)))


def _both_share(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and share_memory(one, other)


def _contiguous_strides(x: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride()


def _form(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, torch.Tensor):
        return "one tensor"
    return "None" if value is None else f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    """An exception in a line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}{where}"
