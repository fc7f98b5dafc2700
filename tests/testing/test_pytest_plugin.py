# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin in a vendor's own test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_fl
from vllm_fl.testing import UnknownNameError
from vllm_fl.testing.vendor import VendorSuite

pytest_plugins = ["pytester"]

VENDOR = """
from torch.nn.functional import silu
from vllm_fl.types import BackendImplKind, OpImpl

def right(x):
    d = x.shape[-1] // 2
    return (silu(x[..., :d]) * x[..., d:]).contiguous()

def wrong(x):
    return right(x) * 1.1

def no_odd_sizes(x):
    return x.shape[-1] % 16 == 0 or "not a multiple of 16"

def register_builtins(registry):
    for name, fn in (("right", right), ("wrong", wrong)):
        registry.register_impl(OpImpl(
            op_name="silu_and_mul", impl_id=f"vendor.plugin_test.{name}", fn=fn,
            kind=BackendImplKind.VENDOR, vendor="plugin_test", supports=no_odd_sizes,
        ))
"""
ASKS = "def test_it(vllm_fl_case):\n    vllm_fl_case.check()\n"
NAMED = ("--vllm-fl-vendor", "plugin_test")
ROOT = Path(vllm_fl.__file__).parents[1]


@pytest.fixture
def vendor(pytester: pytest.Pytester, monkeypatch) -> Callable[..., pytest.RunResult]:
    """vendor(*words) runs pytest with the plugin, where a vendor's module is registered. In a
    process of its own, because pytester forgets what was imported, and torch cannot be imported
    twice."""
    pytester.makepyfile(vllm_fl_of_a_vendor=VENDOR)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "vllm_fl_of_a_vendor")
    paths = [str(pytester.path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    plugin = ("-p", "vllm_fl.testing.pytest_plugin", "-p", "no:cacheprovider", "-W", "error")

    def run(*words: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*plugin, *words, timeout=120)

    return run


def test_every_case_is_a_test_of_the_file_that_asks_for_them(vendor, pytester) -> None:
    pytester.makepyfile(test_mine=ASKS)
    pytester.path.joinpath("xfails.txt").write_text(
        "# known\n\nsilu_and_mul/*.wrong/float32/zero tokens  # has none to be wrong on\n"
        "*.wrong/float32/tiny values # multiplies by 1.1\n"
    )
    words = (
        "float32 and not layout and "
        "((one and token) or (zero and tokens) or (tiny and values) or (odd and size))"
    )
    result = vendor(*NAMED, "--vllm-fl-xfail", "xfails.txt", "-rA", "-k", words)
    outcomes = result.parseoutcomes()
    # Right: three pass, one is refused. Wrong: one fails, one fails as expected, one passes
    # though it should fail, one is refused.
    assert {word: outcomes[word] for word in ("passed", "failed", "skipped", "xfailed")} == {
        "passed": 3,
        "failed": 2,
        "skipped": 2,
        "xfailed": 1,
    }
    for line in (
        "FAILED test_mine.py::test_it[[]silu_and_mul/*.wrong/float32/one token]*",
        "XFAIL test_mine.py::test_it[[]silu_and_mul/*.wrong/*/tiny values] - multiplies by 1.1",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.fnmatch_lines(["[[]XPASS(strict)] has none to be wrong on"])
    result.stdout.fnmatch_lines(["values: output 0 is * ulp from the exact result, limit 8 *"])
    result.stdout.fnmatch_lines(["alone: vllm-fl verify --op silu_and_mul --impl *.wrong *"])
    result.stdout.fnmatch_lines(["SKIPPED*its guard refuses: not a multiple of 16"])


def test_without_a_test_file_the_plugin_brings_its_own_test(vendor) -> None:
    result = vendor(*NAMED, "-v", "-k", "right and float32 and one and token")
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["*conformance.py::test_conformance[[]silu_and_mul/*PASSED*"])


def test_a_line_without_a_reason_is_an_error(vendor, pytester) -> None:
    pytester.path.joinpath("xfails.txt").write_text("silu_and_mul/*\n")
    result = vendor(*NAMED, "--vllm-fl-xfail", "xfails.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*xfails.txt:1: 'silu_and_mul/[*]' has no reason; write: *"])


def test_an_unknown_vendor_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown vendor 'cpi'; valid: .*cpu"):
        VendorSuite("cpi", None)


def test_without_the_option_a_test_that_asks_is_skipped_and_nothing_is_added_or_imported(
    vendor, pytester
) -> None:
    light = (
        "def test_other():\n    import sys\n    assert not {'torch', 'yaml'} & set(sys.modules)\n"
    )
    pytester.makepyfile(test_mine=f"{ASKS}\n{light}")
    result = vendor("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*give --vllm-fl-vendor NAME"])


@pytest.mark.extended
def test_the_example_package_keeps_its_contract(vendor, pytester, monkeypatch) -> None:
    example = ROOT / "examples" / "vendor_package"
    pytester.makepyfile(test_example=(example / "tests" / "test_conformance.py").read_text())
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "vllm_fl_acme")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(example), os.environ["PYTHONPATH"]]))
    result = vendor("--vllm-fl-vendor", "acme", "-rs")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}
    assert outcomes["passed"] > 40
    # Its other kernel is Triton's, and no GPU is asked for here.
    (skipped,) = (line for line in result.outlines if line.startswith("SKIPPED"))
    assert "Triton compiles nothing for a CPU" in skipped
