# SPDX-License-Identifier: Apache-2.0
"""Child processes: what they survive, how a run goes on, and what the API says."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.testing.mutants import implementation
from vllm_fl.backends import Backend
from vllm_fl.dispatch import OpSignature
from vllm_fl.dispatch.errors import DispatchError
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.ops.normalization import RMS_NORM
from vllm_fl.testing import Kind, Status, check_implementation
from vllm_fl.testing.cases import COMPILE
from vllm_fl.testing.child import Job
from vllm_fl.testing.runner import Runner, jobs_of
from vllm_fl.testing.target import Target

ONE = {"dtypes": [torch.float32], "cases": ["one token"]}


def silu(x):
    return SILU_AND_MUL.reference(x)


def check(fn, **settings):
    """One case of silu_and_mul in float32."""
    return check_implementation(implementation(SILU_AND_MUL, fn), **{**ONE, **settings})


def statuses(report) -> dict[str, Status]:
    return {result.case: result.status for result in report.results}


def test_after_a_crash_the_run_goes_on_with_the_next_case() -> None:
    def dies_on_zero_tokens(x):
        if not x.numel():
            os.kill(os.getpid(), signal.SIGSEGV)
        return silu(x)

    report = check(dies_on_zero_tokens, cases=["one token", "zero tokens", "wide", "4-D"])
    assert statuses(report) == {
        "one token": Status.PASSED,
        "zero tokens": Status.FAILED,
        "4-D": Status.PASSED,
        "wide": Status.PASSED,
    }
    [failure] = report.failures
    assert failure.kind is Kind.CRASH
    assert "died of signal 11 (SIGSEGV)" in failure.what
    assert (failure.op, failure.dtype, failure.case) == ("silu_and_mul", "float32", "zero tokens")


def test_a_crash_that_an_earlier_case_caused_is_told_as_such(tmp_path) -> None:
    mark = tmp_path / "damaged"

    def dies_in_the_second_process(x):
        if x.shape[0] == 1:
            mark.write_text(str(os.getpid()))
        elif mark.exists() and mark.read_text() == str(os.getpid()):
            os.abort()
        return silu(x)

    report = check(dies_in_the_second_process, cases=["one token", "zero tokens"])
    [failure] = report.failures
    assert (failure.case, failure.kind) == ("zero tokens", Kind.CRASH)
    assert "though not when the case runs alone" in failure.what
    assert "It ran before: 'one token' (float32)." in failure.what


def test_what_a_dying_process_wrote_is_told() -> None:
    def says_why(x):
        os.write(2, b"kernel: out of shared memory\n")
        os._exit(7)

    [failure] = check(says_why).failures
    assert failure.what == (
        "the process ended with exit code 7; it wrote: kernel: out of shared memory"
    )


def test_output_of_an_implementation_does_not_reach_ours(capfd) -> None:
    def chatters(x):
        print("chatter", flush=True)
        os.write(1, b"chatter")
        return silu(x)

    assert check(chatters).passed
    assert "chatter" not in "".join(capfd.readouterr())


def test_a_hang_ends_after_the_timeout_and_its_process_is_gone(tmp_path) -> None:
    mark = tmp_path / "pid"

    def hangs(x):
        mark.write_text(str(os.getpid()))
        time.sleep(60)

    start = time.monotonic()
    [failure] = check(hangs, timeout=0.3).failures
    assert failure.kind is Kind.HANG
    assert time.monotonic() - start < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_threads_of_the_parent_do_not_make_the_child_hang() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(512, 512) @ torch.randn(512, 512)
        torch.randn(2**18).exp()
        assert check(silu, cases=["wide"]).passed
    finally:
        torch.set_num_threads(before)


def test_several_workers_give_the_results_in_the_order_of_the_jobs() -> None:
    targets = [
        Target(SILU_AND_MUL, implementation(SILU_AND_MUL, silu)),
        Target(RMS_NORM, implementation(RMS_NORM, RMS_NORM.reference)),
    ]
    jobs = [
        job
        for index, target in enumerate(targets)
        for job in jobs_of(index, target, dtypes=["float32"], compile=False)
    ]
    seen = []
    with Runner(targets) as runner:
        results = runner.run(jobs, workers=2, on_result=seen.append)
    found = [(r.op, r.dtype, r.case) for r in results]
    assert found == [(targets[j.target].contract.name, j.dtype, j.case) for j in jobs]
    assert sorted(seen, key=id) == sorted(results, key=id)


def test_a_runner_keeps_its_process_and_starts_another_when_it_is_gone() -> None:
    def tells(x):
        raise ValueError(f"process {os.getpid()}")

    def process(runner: Runner) -> int:
        [result] = runner.run([Job(0, "float32", "one token")])
        [(_, what)] = result.problems
        return int(what.split()[2])

    with Runner([Target(SILU_AND_MUL, implementation(SILU_AND_MUL, tells))]) as runner:
        first = process(runner)
        assert process(runner) == first != os.getpid()
        os.kill(first, signal.SIGKILL)
        while Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert process(runner) != first


# ----------------------------------------------------------------------------- new processes


def test_a_new_interpreter_unpickles_what_is_not_registered() -> None:
    impl = implementation(SILU_AND_MUL, SILU_AND_MUL.reference)
    report = check_implementation(impl, start_method="spawn", **ONE)
    assert report.passed, report


def test_a_closure_cannot_go_there_and_the_error_says_what_to_do() -> None:
    with pytest.raises(DispatchError, match="make its functions module-level ones, or register"):
        check(lambda x: silu(x), start_method="spawn")


def test_a_contract_that_is_nowhere_cannot_go_there_either() -> None:
    contract = replace(SILU_AND_MUL, source="here")
    impl = implementation(contract, SILU_AND_MUL.reference)
    with pytest.raises(DispatchError, match="put it into a tuple CONTRACTS"):
        check_implementation(impl, contract=contract, start_method="spawn", **ONE)


# ---------------------------------------------------------------------------------- the API


def test_every_dtype_and_case_is_checked_and_torch_compile_once_for_each() -> None:
    report = check_implementation(implementation(SILU_AND_MUL, silu))
    assert report.passed, report
    compiled = [r.dtype for r in report.results if r.case == COMPILE]
    assert compiled == ["bfloat16", "float16", "float32"]
    assert len(report.results) > 40
    assert report.skipped == ()


def test_a_vendors_own_op_is_checked_against_its_own_contract() -> None:
    def double(x):
        return (2 * x).contiguous()

    contract = replace(
        SILU_AND_MUL,
        signature=OpSignature.parse("acme_double_halves(x)"),
        reference=lambda x: (2 * x[..., : x.shape[-1] // 2]).contiguous(),
        magnitude=None,
    )
    right = implementation(contract, contract.reference)
    assert check_implementation(right, contract=contract, dtypes=["float32"]).passed
    wrong = implementation(contract, double)
    report = check_implementation(wrong, contract=contract, **ONE)
    assert [failure.kind for failure in report.failures] == [Kind.SHAPE]


def test_without_a_contract_there_is_an_error() -> None:
    impl = replace(implementation(SILU_AND_MUL, silu), op_name="acme_other")
    with pytest.raises(DispatchError, match=r"op 'acme_other' has no contract .* contract="):
        check_implementation(impl)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtypes": [torch.int8]}, "no dtype int8; valid: bfloat16, float16, float32"),
        ({"dtypes": ["half"]}, "no dtype half; valid: bfloat16, float16, float32"),
        ({"cases": ["one tokens"]}, "no case 'one tokens'; valid: .*one token"),
    ],
)
def test_an_unknown_dtype_or_case_is_an_error_that_names_the_valid_ones(settings, text) -> None:
    with pytest.raises(ValueError, match=text):
        check(silu, **settings)


class Elsewhere(Backend):
    device_types = ("npu",)

    def silu_and_mul(self, x):
        return silu(x)


class Broken(Backend):
    def load(self) -> None:
        raise ImportError("no module named acme_kernels")

    def silu_and_mul(self, x):
        return silu(x)


def test_what_is_not_available_is_skipped_and_not_passed() -> None:
    report = check_implementation(implementation(SILU_AND_MUL, Elsewhere().silu_and_mul))
    assert not report.passed
    assert [skip.reason for skip in report.skipped] == ["runs on npu, this device is cpu"]


def test_a_backend_that_does_not_load_is_skipped_with_the_reason() -> None:
    report = check(Broken().silu_and_mul)
    assert not report.passed and not report.failures
    assert [skip.reason for skip in report.skipped] == [
        "loading it raised ImportError: no module named acme_kernels"
    ]


def test_a_refused_case_is_skipped_and_its_call_reaches_the_next_implementation() -> None:
    calls: list[int] = []

    def few_tokens(x):
        return x.shape[0] < 2 or f"{x.shape[0]} tokens are too many"

    def fails_on_more(x):
        calls.append(1)
        if x.shape[0] > 1:
            raise AssertionError("called with more than it takes")
        return silu(x)

    impl = implementation(SILU_AND_MUL, fails_on_more, supports=few_tokens)
    report = check_implementation(impl, dtypes=["float32"], cases=["one token", "wide"])
    assert report.passed, report
    [skip] = report.skipped
    assert (skip.case, skip.reason) == ("wide", "its guard refuses: 5 tokens are too many")


def test_a_guard_that_changes_its_mind_is_found() -> None:
    asked: list[int] = []

    def fickle(x):
        asked.append(1)
        return len(asked) != 1 or "not the first time"

    impl = implementation(SILU_AND_MUL, silu, supports=fickle)
    kinds = {f.kind for f in check_implementation(impl, **ONE).failures}
    assert kinds == {Kind.GUARD}


def test_a_graph_that_differs_from_the_eager_op_is_found() -> None:
    def knows_when_it_is_traced(x):
        out = silu(x)
        return out + 1 if any("aot" in frame for frame in frames()) else out

    def frames() -> list[str]:
        import inspect

        return [frame.filename for frame in inspect.stack(context=0)]

    report = check(knows_when_it_is_traced, cases=[COMPILE])
    assert [f.kind for f in report.failures] == [Kind.COMPILE]
    assert "output 0 differs between eager and compiled" in report.failures[0].what


def test_a_kernel_that_raises_on_every_call_fails_case_by_case() -> None:
    def broken(x):
        raise RuntimeError("boom")

    report = check_implementation(implementation(SILU_AND_MUL, broken), dtypes=["float32"])
    compiled = [result for result in report.results if result.case == COMPILE]
    assert [f.kind for result in compiled for f in result.failures] == [Kind.COMPILE]
    assert len(report.results) > 10
    assert {f.what.partition(" (")[0] for f in report.failures if f.kind is Kind.RAISED} == {
        "RuntimeError: boom"
    }


def test_a_schema_that_does_not_fit_is_found_when_it_is_compiled() -> None:
    contract = replace(
        SILU_AND_MUL,
        signature=OpSignature.parse("acme_wrong_fake(x)"),
        fake=lambda x: x.new_empty(x.shape[0]),
    )
    impl = implementation(contract, contract.reference)
    report = check_implementation(impl, contract=contract, **ONE)
    assert [f.kind for f in report.failures] == [Kind.SHAPE]
