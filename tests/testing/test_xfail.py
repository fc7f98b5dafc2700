# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_fl.testing.xfail import XfailError, check_all_used, read_xfails, reason_for


@pytest.fixture
def xfails(tmp_path):
    """xfails(text) reads a file with that text."""

    def read(text: str):
        path = tmp_path / "xfails.txt"
        path.write_text(text)
        return read_xfails(path)

    return read


def test_a_line_is_a_name_and_a_reason(xfails) -> None:
    lines = xfails("# all\n\nrms_norm/*/float16/huge values  # overflows, fixed in 2.1 # soon\n")
    assert [(line.pattern, line.reason) for line in lines] == [
        ("rms_norm/*/float16/huge values", "overflows, fixed in 2.1 # soon")
    ]
    assert lines[0].where.endswith("xfails.txt:3")


def test_only_the_star_stands_for_something_else(xfails) -> None:
    lines = xfails("a/b.c/*/1-D [x]? # why\n")
    assert reason_for("a/b.c/float32/1-D [x]?", lines) == "why"
    assert reason_for("a/b_c/float32/1-D [x]?", lines) is None
    assert reason_for("a/b.c/float32/1-D x", lines) is None
    assert reason_for("a/b.c/float32/1-D [x]?, more", lines) is None


def test_the_first_line_that_fits_gives_the_reason(xfails) -> None:
    lines = xfails("a/* # first\na/b # second\n")
    assert reason_for("a/b", lines) == "first"


@pytest.mark.parametrize("line", ["a/b", "a/b #", "a/b   #  "])
def test_a_line_without_a_reason_is_an_error(xfails, line: str) -> None:
    with pytest.raises(XfailError, match=r"xfails.txt:2: 'a/b' has no reason; write: op/impl"):
        xfails(f"# known\n{line}\n")


def test_a_line_about_no_test_is_an_error(xfails) -> None:
    lines = xfails("a/* # why\ngone/* # why\n")
    check_all_used(["a/b", "gone/c"], lines)
    with pytest.raises(XfailError, match=r"xfails.txt:2: no test is called 'gone/\*'; remove"):
        check_all_used(["a/b"], lines)


def test_an_absent_file_is_an_error_with_its_name(tmp_path) -> None:
    with pytest.raises(XfailError, match=r"cannot read the xfail file .*absent.txt: No such file"):
        read_xfails(tmp_path / "absent.txt")
