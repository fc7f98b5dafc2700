# SPDX-License-Identifier: Apache-2.0
"""The pages of the on-ramp say what the code does. `python tests/cli/test_vendor_docs.py` writes
the checklist anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.cli.check_vendor import ITEMS
from vllm_fl.cli.new_vendor import DEFAULT_OPS, package_files

DOCS = Path(__file__).parents[2] / "docs"
CHECKLIST = re.compile(r"(<!-- checklist -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def checklist() -> str:
    rows = [f"| {item} | {asks} |\n" for item, asks in ITEMS.items()]
    return "".join(["| Item | What it asks |\n|---|---|\n", *rows])


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_checklist_of_the_page_is_that_of_the_command():
    found = CHECKLIST.search(page("commands/check-vendor.md"))
    assert found is not None
    assert found[2] == checklist(), f"run: python {__file__}"


def test_the_tutorial_s_four_commands_are_those_that_new_vendor_names():
    block = re.search(r"<!-- run -->\n(.*?)<!-- end -->", page("add-a-vendor.md"), re.DOTALL)
    assert block is not None
    assert [line.strip() for line in block[1].splitlines()] == [
        "vllm-fl new-vendor acme",
        "pip install ./vllm-plugin-acme",
        "pytest vllm-plugin-acme",
        "vllm-fl check-vendor vllm_fl_acme",
    ]


def test_the_function_of_the_tutorial_is_the_one_that_is_written():
    written = package_files("acme", DEFAULT_OPS)["vllm_fl_acme/impl/activation.py"]
    block = re.search(r"```python\n(.*?)```", page("add-a-vendor.md"), re.DOTALL)
    assert block is not None and block[1] in written


def test_the_files_of_the_page_are_those_that_are_written():
    listed = re.findall(r"^  (\S+/\S+|\S+\.\w+)$", page("commands/new-vendor.md"), re.MULTILINE)
    assert listed == list(package_files("acme", DEFAULT_OPS))


def test_the_example_of_an_own_op_runs_and_prints_what_it_says():
    block = re.search(
        r"<!-- example -->\n```python\n(.*?)```", page("add-an-operator.md"), re.DOTALL
    )
    assert block is not None
    expected = [line[2:] for line in block[1].splitlines() if line.startswith("# ")]
    command = [sys.executable, "-W", "error", "-c", block[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("name", ["add-a-vendor", "add-an-operator"])
def test_both_languages_hold_the_same_commands_code_and_links(name):
    english, chinese = page(f"{name}.md"), page(f"{name}_zh.md")
    for pattern in (r"```.*?```", r"^    \S.*$", r"^#+ ", r"\]\((?!add-)([^)]*)\)"):
        same = re.compile(pattern, re.DOTALL | re.MULTILINE if "```" in pattern else re.MULTILINE)
        assert same.findall(english) == same.findall(chinese), pattern


if __name__ == "__main__":
    path = DOCS / "commands/check-vendor.md"
    path.write_text(CHECKLIST.sub(lambda m: m[1] + checklist() + m[3], path.read_text()))
