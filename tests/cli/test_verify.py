# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vllm_fl.cli.main import main
from vllm_fl.cli.verify import render
from vllm_fl.dispatch import get_default_manager, reset_default_manager
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.ops.activation import SILU_AND_MUL
from vllm_fl.testing import CaseResult, Kind, Report, Skip

PAGE = Path(__file__).parents[2] / "docs" / "commands" / "verify.md"
ONE = ["--op", "silu_and_mul", "--impl", "reference.torch", "--dtype", "float32"]


def sample() -> Report:
    """What the page shows."""
    cases = ("one token", "odd size", "slice of wider rows")
    refused = "its guard refuses: hidden_size 61 is not a positive multiple of 8"
    wrong = "output 0 is 4.71e+06 ulp from the exact result, limit 2.5 (at [4, 63] found 0.0, "
    results = [
        CaseResult("silu_and_mul", "reference.torch", dtype, case)
        for dtype in ("bfloat16", "float32")
        for case in cases
    ]
    results += [
        CaseResult("rms_norm", "vendor.cpu", "bfloat16", "one token"),
        CaseResult("rms_norm", "vendor.cpu", "bfloat16", "odd size", reason=refused),
        CaseResult(
            "rms_norm",
            "vendor.cpu",
            "bfloat16",
            "slice of wider rows",
            ((Kind.VALUES, f"{wrong}exact 1.15)"),),
        ),
    ]
    left_out = Skip("rms_norm", "vendor.ascend", None, None, "runs on npu, this device is cpu")
    return Report(tuple(results), (left_out,))


def rendered(report: Report, seconds: float = 4.2) -> str:
    stream = io.StringIO()
    render({**report.to_dict(), "seconds": seconds}, stream)
    return "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())


def with_example(page: str) -> str:
    before, _, rest = page.partition("<!-- verify -->\n")
    _, closing, after = rest.partition("<!-- end -->")
    example = f"```\n$ vllm-fl verify --op rms_norm --op silu_and_mul\n{rendered(sample())}\n```\n"
    return f"{before}<!-- verify -->\n{example}{closing}{after}"


def test_the_example_on_the_page_is_what_the_command_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_example(text) == text, "run: python tests/cli/test_verify.py"


def test_the_page_names_every_option_and_no_other(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    words = capsys.readouterr().out.replace("[", " ").replace(",", " ").replace("]", " ").split()
    options = {word for word in words if word.startswith("--")} - {"--help"}
    table = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("## ")[0]
    assert {w.strip("`") for w in table.split() if w.startswith("`--")} == options


@pytest.fixture
def verify(capfd) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """verify(*words) runs the command: exit code, stdout, stderr."""
    reset_default_manager()

    def verify(*words: str) -> tuple[int, str, str]:
        code = main(["verify", *words])
        return (code, *capfd.readouterr())

    yield verify
    reset_default_manager()


def test_json_is_all_that_is_on_stdout_and_progress_is_on_stderr(verify) -> None:
    code, out, err = verify(*ONE, "--case", "one token", "--case", "zero tokens", "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (data["cases"], data["failed"], data["failures"]) == (2, 0, [])
    assert data["skipped"] == []
    counts = {"passed": 2, "failed": 0, "skipped": 0}
    implementation = {"impl": "reference.torch", "dtypes": {"float32": counts}}
    assert data["ops"] == [{"op": "silu_and_mul", "cases": 2, "implementations": [implementation]}]
    assert "[1/1] silu_and_mul: 2 cases, 0 failed, 0 skipped" in err


def test_a_failing_case_is_named_with_the_command_that_runs_it_alone(verify, tmp_path) -> None:
    def wrong(x):
        return SILU_AND_MUL.reference(x) * 1.1

    impl = OpImpl(
        op_name="silu_and_mul",
        impl_id="vendor.wrong",
        kind=BackendImplKind.VENDOR,
        fn=wrong,
        vendor="wrong",
    )
    get_default_manager().ensure_initialized()
    get_default_manager().registry.register_impl(impl)
    file = tmp_path / "report.xml"
    words = ("--impl", "vendor.wrong", "--dtype", "float32", "--case", "one token")
    code, out, _ = verify(*words, "--junit", str(file))
    assert code == 1
    assert "FAILED silu_and_mul by vendor.wrong, float32, 'one token': values: output 0" in out
    assert (
        "  alone: vllm-fl verify --op silu_and_mul --impl vendor.wrong --dtype float32 "
        "--case 'one token'\n" in out
    )
    assert "1 cases of 1 ops in " in out and ": 1 failed, 0 not run." in out
    [case] = ElementTree.parse(file).iter("testcase")
    assert case.attrib["name"] == "float32: one token"
    assert case.find("failure") is not None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--op", "rms_nrm"], "unknown op 'rms_nrm'; valid: "),
        (["--op", "rms_nrm"], 'Did you mean "rms_norm"?'),
        (["--op", "rms_norm", "--impl", "vendor.acme"], "unknown implementation 'vendor.acme'; "),
        (["--op", "rms_norm", "--impl", "vendor.acme"], "reference.torch"),
        ([*ONE, "--dtype", "int3"], "unknown dtype 'int3'; valid: bfloat16, float16, float32."),
        ([*ONE, "--case", "one tokens"], 'Did you mean "one token"?'),
        (["--device", "abacus"], "unknown device 'abacus'"),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_wrong_usage_is_exit_code_2_and_names_what_is_valid(verify, words, text) -> None:
    code, out, err = verify(*words)
    assert (code, out) == (2, "")
    assert text in err


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(verify, tmp_path) -> None:
    file = tmp_path / "absent" / "report.xml"
    code, out, err = verify(*ONE, "--case", "one token", "--junit", str(file))
    assert (code, out) == (1, "")
    assert f"cannot write {file}: No such file or directory" in err


def test_where_nothing_ran_nothing_is_fine(verify) -> None:
    words = ("--op", "attention_backend")
    code, out, _ = verify(*words)
    assert code == 1
    assert "a selector: it answers with a name" in out
    assert "Nothing ran, so nothing is shown to be right." in out


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_workers_are_counted_from_one(number: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--workers", number])
    assert ended.value.code == 2
    assert "must be a whole number of at least 1" in capsys.readouterr().err


if __name__ == "__main__":
    PAGE.write_text(with_example(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
