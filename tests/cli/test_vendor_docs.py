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
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.types import DeviceFacts, OpImpl, OpSignature

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


def test_the_policy_of_the_tutorial_puts_the_vendor_before_flaggems(tmp_path):
    block = re.search(r"```yaml\n(.*?)```", page("add-a-vendor.md"), re.DOTALL)
    assert block is not None
    (tmp_path / "acme.yaml").write_text(block[1])
    registry = OpRegistry()
    registry.plugins = ()
    registry.declare(OpSignature.parse("silu_and_mul(x)"))
    for impl_id, kind, vendor, priority in (
        ("default.flaggems", "flagos", None, 150),
        ("vendor.acme", "vendor", "acme", 100),
    ):
        registry.register_impl(OpImpl("silu_and_mul", impl_id, kind, lambda x: x, vendor, priority))
    registry.add_policies(tmp_path)
    decision = OpManager(registry, device=DeviceFacts("acme", "acme")).decide("silu_and_mul")
    assert decision.winner_id == "vendor.acme"


@pytest.mark.parametrize("name", ["add-a-vendor", "add-an-operator"])
def test_both_languages_hold_the_same_commands_code_and_links(name):
    english, chinese = page(f"{name}.md"), page(f"{name}_zh.md")
    for pattern in (r"```.*?```", r"^    \S.*$", r"^#+ ", r"\]\((?!add-)([^)]*)\)"):
        same = re.compile(pattern, re.DOTALL | re.MULTILINE if "```" in pattern else re.MULTILINE)
        assert same.findall(english) == same.findall(chinese), pattern


if __name__ == "__main__":
    path = DOCS / "commands/check-vendor.md"
    path.write_text(CHECKLIST.sub(lambda m: m[1] + checklist() + m[3], path.read_text()))
