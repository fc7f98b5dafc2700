# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import subprocess
import sys

import pytest

from tests.cli.helpers import run
from vllm_fl.cli.output import print_table

PROGRAM = """
import os, subprocess, sys
from vllm_fl.cli.output import answer_stream

print("before")
with answer_stream() as stream:
    print("python writes")
    os.write(1, b"a library writes\\n")
    subprocess.run([sys.executable, "-c", "print('a child writes')"], check=True)
    print("the answer: \\u4f60\\u597d", file=stream)
    {inside}
print("after")
"""


def run_program(inside: str = "pass") -> subprocess.CompletedProcess[bytes]:
    program = PROGRAM.replace("{inside}", inside)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60,
                          check=False)  # fmt: skip


def test_what_libraries_and_child_processes_print_does_not_mix_with_the_answer() -> None:
    done = run_program()
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "before\nthe answer: 你好\nafter\n"
    assert sorted(done.stderr.decode().splitlines()) == [
        "a child writes",
        "a library writes",
        "python writes",
    ]


def test_stdout_is_itself_again_after_an_exception() -> None:
    done = run_program("raise SystemExit(print('given up', file=stream) or 3)")
    assert done.returncode == 3
    assert done.stdout.decode() == "before\nthe answer: 你好\ngiven up\n"


def test_the_answer_is_utf8_whatever_the_locale_is() -> None:
    program = PROGRAM.replace("{inside}", "pass")
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PATH": ""},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.decode() == "before\nthe answer: 你好\nafter\n", done.stderr.decode()


def table(columns, rows) -> list[str]:
    stream = io.StringIO()
    print_table(stream, columns, rows)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_table_has_its_headings_a_line_and_its_numbers_to_the_right() -> None:
    found = table(
        ("operator", "calls", "why"),
        [("rms_norm", 1220, "highest priority"), ("silu_and_mul", 30, "named")],
    )
    assert found == [
        "",
        " operator       calls   why",
        " " + "─" * 39,
        " rms_norm        1220   highest priority",
        " silu_and_mul      30   named",
        "",
    ]


def test_text_is_printed_as_it_is() -> None:
    odd = "[bold]not bold[/bold] :smile: [/] vendor:cpu"
    assert table(("why",), [(odd,)])[3] == f" {odd}"


def test_a_long_text_is_folded_and_nothing_of_it_is_lost() -> None:
    words = " ".join(f"word{i}" for i in range(60))
    lines = table(("operator", "why"), [("rms_norm", words)])
    assert max(map(len, lines)) <= 110
    assert " ".join(" ".join(lines[3:]).split()[1:]) == words
    endless = "x" * 300
    assert "".join(table(("why",), [(endless,)])[3:]).replace(" ", "") == endless


def test_a_table_without_rows_has_its_headings() -> None:
    assert table(("operator", "calls"), [])[1] == " operator   calls"


@pytest.fixture
def quick(without, modules):
    """The arguments of `run` for an answer that takes a second at most."""
    return {"path": [without("torch", "vllm")]}


def test_a_closed_stdout_is_told_and_no_other_file_gets_the_answer(quick, tmp_path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        done = run("config", stderr=file, preexec_fn=lambda: os.close(1), **quick)
    assert done.returncode == 1
    assert log.read_text() == "vllm-fl: stdout is closed, so the answer has nowhere to go\n"


def test_a_closed_stderr_takes_nothing_from_the_answer(quick, tmp_path) -> None:
    answer = tmp_path / "answer"
    env = {"VLLM_FL_PREFER": "cuda"}
    with answer.open("w") as file:
        options = {"stdout": file, "preexec_fn": lambda: os.close(2)}
        assert run("config", **options, **quick).returncode == 0
        assert "log_level" in answer.read_text()
        file.truncate(0)
        assert run("config", env=env, **options, **quick).returncode == 1
    assert answer.read_text() == ""


def test_a_reader_who_has_had_enough_ends_it_without_a_word(quick) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    try:
        done = run("config", stdout=writable, stderr=subprocess.PIPE, **quick)
    finally:
        os.close(writable)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "ERROR" not in line] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("argument", ["config", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(quick, argument: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        env = {"PYTHONUNBUFFERED": unbuffered}
        done = run(argument, stdout=full, stderr=subprocess.PIPE, env=env, **quick)
    if (argument, unbuffered) == ("--help", "1"):  # argparse itself passes over it
        assert (done.returncode, done.stderr) == (0, "")
        return
    who = "vllm-fl" if argument == "--help" else f"vllm-fl {argument}"
    said = f"{who}: cannot go on: No space left on device; the answer is not complete"
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "ERROR" not in line] == [said]


def test_a_name_that_is_no_utf8_is_printed_and_read_back(quick, tmp_path) -> None:
    file = os.fsencode(tmp_path) + b"/\xff.yaml"
    with open(file, "w") as opened:
        opened.write("strict: true\n")
    env = {"VLLM_FL_CONFIG": os.fsdecode(file)}
    done = run("config", "--json", env=env, **quick)
    assert done.returncode == 0, done.stderr
    assert os.fsencode(json.loads(done.stdout)["config"]["value"]) == file
    done = run("config", env=env, **quick)
    assert done.returncode == 0, done.stderr
    assert "\\udcff.yaml" in done.stdout
