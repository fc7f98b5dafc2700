# SPDX-License-Identifier: Apache-2.0
"""The native operators that stand in graphs: they do without Python what they can, and pass the
rest on to `torch.ops.vllm_fl`, which knows every binding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.native import NATIVE
from vllm_fl.dispatch import DispatchError, OpManager
from vllm_fl.ops import CONTRACTS
from vllm_fl.ops.library import Entry, bind_name, define, entries, op_for, operator_of
from vllm_fl.vllm_plugin.compile import opaque

pytestmark = pytest.mark.skipif(not NATIVE, reason="there are no native kernels here")

BY_NAME = {contract.name: contract for contract in CONTRACTS}
FORMS = [("silu_and_mul", False), ("rms_norm", False), ("fused_add_rms_norm", True)]
NORM = (torch.ones(64), 1e-6)


@pytest.fixture
def bound() -> Iterator[Any]:
    """bound(op, inplace): a binding's entry, and what a graph calls for it."""
    made: list[Entry] = []

    def bound(op: str, inplace: bool = False) -> tuple[Entry, Any]:
        define(BY_NAME[op])
        entry = bind_name(OpManager().bind_op(op, donate=inplace), f"test{'!' * inplace}")
        made.append(entry)
        return entry, operator_of(entry, inplace=inplace)

    yield bound
    for entry in made:
        entry.set_counting(False)
        entries.pop(entry.name, None)


def broken(*args: Any) -> Any:
    raise RuntimeError("Python was called")


@pytest.mark.parametrize(("op", "inplace"), FORMS)
def test_it_takes_what_the_opaque_operator_takes(bound, op, inplace) -> None:
    entry, operator = bound(op, inplace)
    opaque = op_for(op, inplace=inplace)
    assert operator.namespace == "vllm_fl_C" and operator._overloadname == "bound"
    mine, theirs = (str(o._schema).partition("(")[2] for o in (operator, opaque))
    theirs = theirs.replace('binding=""', "binding").replace("SymInt?", "int?")  # it is a fact
    assert mine == theirs
    for name in ("test_schema", "test_autograd_registration", "test_faketensor"):
        for case in BY_NAME[op].cases_for(torch.float32)[:8]:
            args = case.make(torch.float32, torch.Generator().manual_seed(1))
            if not any(torch.is_tensor(a) and a.isnan().any() for a in args):  # equals nothing
                torch.library.opcheck(operator, args, {"binding": entry.name}, test_utils=name)


@pytest.mark.parametrize(("op", "inplace"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_the_opaque_operator_gives(bound, op, inplace, dtype) -> None:
    """In every case of the contract, those that the kernel refuses among them."""
    entry, operator = bound(op, inplace)
    opaque = op_for(op, inplace=inplace)
    for case in BY_NAME[op].cases_for(dtype):
        args, twins = (case.make(dtype, torch.Generator().manual_seed(1)) for _ in range(2))
        try:
            expected = opaque(*twins, binding=entry.name)
        except DispatchError as error:
            with pytest.raises(type(error)):
                operator(*args, binding=entry.name)
            continue
        found = operator(*args, binding=entry.name)
        for x, y in zip((found, *args), (expected, *twins), strict=True):
            if isinstance(x, torch.Tensor):
                assert torch.equal(x.nan_to_num(), y.nan_to_num()), case.name


def test_no_python_runs_while_the_kernel_takes_the_calls(bound) -> None:
    entry, operator = bound("rms_norm")
    x = torch.randn(3, 64)
    right = operator(x, *NORM, binding=entry.name)
    entry.fn = broken
    assert torch.equal(operator(x, *NORM, binding=entry.name), right)
    entry.backend.set_direct(entry.name, False)
    with pytest.raises(RuntimeError, match="Python was called"):
        operator(x, *NORM, binding=entry.name)
    entry.backend.set_direct(entry.name, True)
    assert torch.equal(operator(x, *NORM, binding=entry.name), right)


def test_calls_are_counted_where_counting_is_on(bound) -> None:
    entry, operator = bound("silu_and_mul")
    x = torch.randn(3, 64)
    for on, calls in ((False, {}), (True, {"vendor.cpu.fl": 1}), (False, {"vendor.cpu.fl": 1})):
        entry.set_counting(on)
        operator(x, binding=entry.name)
        assert entry.calls == calls


def test_what_the_kernel_refuses_goes_on_and_is_noted(bound) -> None:
    entry, operator = bound("rms_norm")
    x = torch.randn(3, 128)[:, ::2]
    expected = BY_NAME["rms_norm"].reference(x, *NORM)
    torch.testing.assert_close(operator(x, *NORM, binding=entry.name), expected)
    assert "vendor.cpu.fl" in entry.binding.call_rejections


def test_two_results_in_one_place_are_refused_as_ever(bound) -> None:
    entry, operator = bound("fused_add_rms_norm", inplace=True)
    rows = torch.randn(5, 64)
    before = rows.clone()
    for x, residual in ((rows, rows), (rows[:4], rows[1:])):
        with pytest.raises(DispatchError, match="x and residual share memory"):
            operator(x, residual, *NORM, binding=entry.name)
    assert torch.equal(rows, before)


def test_a_weight_inside_of_what_is_written_is_read_first(bound) -> None:
    entry, operator = bound("fused_add_rms_norm", inplace=True)
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    out, total = BY_NAME["fused_add_rms_norm"].reference(x, residual, x[2], 1e-6)
    operator(x, residual, x[2], 1e-6, binding=entry.name)
    torch.testing.assert_close((x, residual), (out, total))


def test_a_binding_that_nobody_made_is_refused_as_ever(bound) -> None:
    _, operator = bound("silu_and_mul")
    with pytest.raises(DispatchError, match=r"'silu_and_mul\(\):gone'.*which no layer of this"):
        operator(torch.randn(3, 32), binding="silu_and_mul():gone")


def test_bindings_can_be_switched_while_others_call(bound) -> None:
    entry, operator = bound("silu_and_mul")
    x = torch.randn(2, 64)
    right, wrong = operator(x, binding=entry.name), []

    def call() -> None:
        for _ in range(2000):
            if not torch.equal(operator(x, binding=entry.name), right):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for count in range(300):
        entry.backend.set_direct(entry.name, count % 2 == 0)
        entry.backend.set_direct(f"another {count % 7}", count % 3 == 0)
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_holds_it(bound) -> None:
    bound("rms_norm")  # defines the op
    binding = OpManager().bind_op("rms_norm")
    entry, fn = opaque(binding, {"of": "a graph"}, inplace=False)
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    x = torch.randn(3, 64)
    torch.compiler.reset()
    try:
        compiled = torch.compile(lambda x: fn(x, *NORM), fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x), BY_NAME["rms_norm"].reference(x, *NORM))
    finally:
        del entries[entry.name]
    assert nodes == ["vllm_fl_C.rms_norm.bound"]
