# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from xml.etree import ElementTree

from vllm_fl.testing import CaseResult, Failure, Kind, Report, Skip

PASSED = CaseResult("op", "vendor.a", "float32", "one token", seconds=0.25)
REFUSED = CaseResult("op", "vendor.a", "float32", "odd size", reason="odd")
FAILED = CaseResult(
    "op",
    "vendor.a",
    "bfloat16",
    "it's wide",
    ((Kind.VALUES, "output 0 is far"), (Kind.ALIAS, "output 0 shares memory with x\x00")),
)
LEFT_OUT = Skip("other", None, None, None, "nobody implements it")


def test_it_passes_if_nothing_failed_and_something_ran() -> None:
    assert Report((PASSED, REFUSED)).passed
    assert not Report((PASSED, FAILED)).passed
    assert not Report((REFUSED,)).passed
    assert not Report((), (LEFT_OUT,)).passed
    assert not Report().passed


def test_a_failure_for_each_broken_promise_and_a_case_is_counted_once() -> None:
    report = Report((PASSED, REFUSED, FAILED), (LEFT_OUT,))
    assert (report.cases, report.failed) == (2, 1)
    assert [f.kind for f in report.failures] == [Kind.VALUES, Kind.ALIAS]
    assert [s.reason for s in report.skipped] == ["nobody implements it", "odd"]


def test_a_failure_says_how_it_is_run_alone() -> None:
    failure = Report((FAILED,)).failures[0]
    assert failure.rerun == (
        "vllm-fl verify --op op --impl vendor.a --dtype bfloat16 --case 'it'\"'\"'s wide'"
    )
    there = Failure("op", "vendor.a", "float32", "wide", Kind.VALUES, "far", "cuda:1")
    assert there.rerun.endswith(" --case wide --device cuda:1")


def test_the_text_has_every_failure_and_where_nothing_ran_every_reason() -> None:
    assert str(Report((PASSED, FAILED))) == (
        "2 cases, 1 failed, 0 skipped\n"
        "  op by vendor.a, bfloat16, case 'it's wide': values: output 0 is far\n"
        "  op by vendor.a, bfloat16, case 'it's wide': alias: output 0 shares memory with x\x00"
    )
    assert str(Report((REFUSED,))) == "0 cases, 0 failed, 1 skipped\n  not run: odd"


def test_the_data_are_json_and_say_all() -> None:
    data = json.loads(json.dumps(Report((PASSED, REFUSED, FAILED), (LEFT_OUT,)).to_dict()))
    assert (data["cases"], data["failed"]) == (2, 1)
    assert data["skipped"] == [
        {"op": "other", "reason": "nobody implements it"},
        {
            "op": "op",
            "impl": "vendor.a",
            "dtype": "float32",
            "case": "odd size",
            "reason": "odd",
        },
    ]
    assert [f["kind"] for f in data["failures"]] == ["values", "alias"]
    dtypes = {
        "float32": {"passed": 1, "failed": 0, "skipped": 1},
        "bfloat16": {"passed": 0, "failed": 1, "skipped": 0},
    }
    implementation = {"impl": "vendor.a", "dtypes": dtypes}
    assert data["ops"] == [{"op": "op", "cases": 2, "implementations": [implementation]}]


def test_junit_has_a_suite_for_each_op_and_a_test_for_each_case() -> None:
    root = ElementTree.fromstring(Report((PASSED, REFUSED, FAILED), (LEFT_OUT,)).to_junit())
    suites = {suite.attrib["name"]: suite.attrib for suite in root}
    assert {k: (v["tests"], v["failures"], v["skipped"]) for k, v in suites.items()} == {
        "op": ("3", "1", "1"),
        "other": ("1", "0", "1"),
    }
    names = [(c.attrib["classname"], c.attrib["name"]) for c in root.iter("testcase")]
    assert names[0] == ("op.vendor.a", "float32: one token")
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None and failure.attrib["type"] == "values, alias"
    assert "output 0 shares memory with x" in (failure.text or "")
    assert root.find("testsuite/testcase").attrib["time"] == "0.250"
