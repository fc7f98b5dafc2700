# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import pytest

from vllm_fl.cli.arguments import once, positive, read_shape, read_value
from vllm_fl.cli.errors import UsageError

HUGE = "9" * 5000
"""More digits than Python reads."""


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("4096", 4096), ("2147483647", 2**31 - 1)])
def test_a_count_is_a_whole_number(text: str, value: int) -> None:
    assert positive(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0", 'must be a whole number of at least 1, found "0"'),
        ("-8", 'must be a whole number of at least 1, found "-8"'),
        ("1.5", 'must be a whole number of at least 1, found "1.5"'),
        ("", 'must be a whole number of at least 1, found ""'),
        (HUGE, f'must be a whole number of at least 1, found "{HUGE[:57]}..."'),
        (
            "2147483648",
            'must be a whole number of at least 1 and at most 2147483647, found "2147483648"',
        ),
    ],
)
def test_what_is_no_count_is_told(text: str, problem: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        positive(text)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("text", "shape"),
    [("32,4096", ("", (32, 4096))), ("key=0,8", ("key", (0, 8))), ("", ("", ()))],
)
def test_a_shape_may_have_the_array_s_name(text: str, shape: tuple) -> None:
    assert read_shape(text) == shape


@pytest.mark.parametrize("text", ["-1", "4,x", "=4", HUGE])
def test_what_is_no_shape_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be sizes such as 32,4096 or key"):
        read_shape(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("epsilon=1e-6", 1e-6),
        ("approximate=tanh", "tanh"),
        ("is_neox=False", False),
        ("section=(8,4)", [8, 4]),
        ("variance_size=None", None),
        (f"epsilon={HUGE}", HUGE),
        ("epsilon=" + "(" * 5000, "(" * 5000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_is_read_as_python_reads_it_or_is_a_word(text: str, value) -> None:
    assert read_value(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize("written", ["{1}", "{'a': 1}", "1j", "b'x'", "...", "[[1]]"])
def test_a_value_that_no_op_takes_is_told(written: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read_value(f"epsilon={written}")
    assert str(caught.value) == (
        "must be a number, a word, True, False, None or a list of numbers, found "
        f'"{written}" for epsilon'
    )


def test_a_name_that_is_given_twice_is_wrong_usage() -> None:
    assert once("--set", [("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(UsageError, match=r"^--set: a is given twice; keep one of the two$"):
        once("--set", [("a", 1), ("b", 2), ("a", 1)])
    with pytest.raises(UsageError, match=r"^--shape: the argument under test is given twice; "):
        once("--shape", [("", (1,)), ("", (1,))])
