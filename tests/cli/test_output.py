# SPDX-License-Identifier: Apache-2.0
import io
import subprocess
import sys

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


def run(inside: str = "pass") -> subprocess.CompletedProcess[bytes]:
    program = PROGRAM.replace("{inside}", inside)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60,
                          check=False)  # fmt: skip


def test_what_libraries_and_child_processes_print_does_not_mix_with_the_answer() -> None:
    done = run()
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "before\nthe answer: 你好\nafter\n"
    assert sorted(done.stderr.decode().splitlines()) == [
        "a child writes",
        "a library writes",
        "python writes",
    ]


def test_stdout_is_itself_again_after_an_exception() -> None:
    done = run("raise SystemExit(print('given up', file=stream) or 3)")
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
