# SPDX-License-Identifier: Apache-2.0
"""The parts of the documents that come from the code are equal to it: the settings, the vendor's
module, and what each command prints on a machine that is the same everywhere.

`python tests/test_docs.py` writes them anew.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import bench, config, doctor, explain, snapshot
from vllm_fl.cli import list as list_command
from vllm_fl.cli.main import COMMANDS, build_parser
from vllm_fl.dispatch.config import SETTINGS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a program

from tests.cli import samples  # noqa: E402
from tests.native import NATIVE  # noqa: E402
from tests.settings_zh import DEFAULT, HEADER, WORDS  # noqa: E402

READMES = ("README.md", "README_zh.md")
VENDOR = "examples/vendor_package/vllm_fl_acme/__init__.py"


def settings_table(words: Mapping[str, str] | None = None) -> str:
    """The configuration table in Markdown; with `words`, in Chinese."""
    header = "| Variable | YAML key | Value | What it does |" if words is None else HEADER
    rows = [header, "|---|---|---|---|"]
    for setting in SETTINGS:
        key = f"`{setting.name}`" if setting.from_data is not None else ""
        form, summary = setting.form, setting.summary
        if words is not None:
            form, summary = words[form], words[summary]
        told = " (default {})" if words is None else DEFAULT
        default = told.format(setting.default) if setting.default else ""
        form = form.replace("|", "\\|")
        summary = summary.replace("<", "&lt;")
        rows.append(f"| `{setting.variable}` | {key} | {form}{default} | {summary} |")
    return "\n".join(rows)


def vendor_module() -> str:
    """The example package's module as a code block, without its license line."""
    lines = (ROOT / VENDOR).read_text(encoding="utf-8").splitlines()
    code = "\n".join(line for line in lines if not line.startswith("# SPDX")).strip()
    return f"```python\n{code}\n```"


def answer(render: Callable[..., None], data: dict[str, Any]) -> str:
    """What a command prints, as a block."""
    stream = io.StringIO()
    render(data, stream)
    lines = (line.rstrip() for line in stream.getvalue().splitlines())
    return "```\n" + "\n".join(lines).strip("\n") + "\n```"


ANSWERS: dict[str, Callable[[], str]] = {
    "docs/commands/list.md": lambda: answer(list_command.render, samples.sample_list()),
    "docs/commands/explain.md": lambda: answer(explain.render, samples.sample_explain()),
    "docs/commands/config.md": lambda: answer(config.render, samples.sample_config()),
    "docs/commands/doctor.md": lambda: answer(doctor.render, samples.sample_doctor()),
    "docs/commands/bench.md": lambda: answer(bench.render, samples.sample_bench()),
    "docs/commands/snapshot.md": lambda: answer(snapshot.render, samples.sample_snapshot()),
}
"""Document to what stands in its block `output`."""


def generated(document: str) -> dict[str, Callable[[], str]]:
    """The blocks of a readme, and what stands in them."""
    words = WORDS if document.endswith("_zh.md") else None
    return {"settings": lambda: settings_table(words), f"vendor: {VENDOR}": vendor_module}


def block(name: str) -> re.Pattern[str]:
    """The marked block: from its opening comment to its closing one."""
    opening = re.escape(f"<!-- {name} -->")
    return re.compile(rf"({opening}\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def written(text: str, document: str) -> str:
    """A document with its generated blocks made anew."""
    blocks = {"output": ANSWERS[document]} if document in ANSWERS else generated(document)
    for name, render in blocks.items():
        text = block(name).sub(lambda m, r=render: m.group(1) + r() + m.group(3), text)
    return text


@pytest.mark.parametrize("readme", READMES)
@pytest.mark.parametrize("name", generated("README.md"))
def test_a_generated_block_is_there_and_equal_to_the_code(readme: str, name: str) -> None:
    found = block(name).search((ROOT / readme).read_text(encoding="utf-8"))
    assert found is not None, f"{readme} has no block <!-- {name} -->"
    assert found.group(2) == generated(readme)[name](), "run: python tests/test_docs.py"


def test_the_vendor_module_takes_about_twenty_lines() -> None:
    code = [line for line in vendor_module().splitlines() if line.strip() and "```" not in line]
    assert len(code) <= 20


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("readme", READMES)
def test_the_readme_example_runs_and_prints_what_it_says(readme: str) -> None:
    code = next(b for b in python_blocks(ROOT / readme) if "explain_op" in b)
    expected = [line[2:] for line in code.splitlines() if line.startswith("# ")]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = result.stdout.splitlines()
    if NATIVE:
        assert found[: len(expected)] == expected
    else:  # the example is of an installation with native kernels
        assert found[0] == expected[0].removesuffix(".fl")


def test_the_two_readmes_hold_the_same_code_and_headings() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    fences = re.compile(r"```.*?```|^    \S.*$", re.DOTALL | re.MULTILINE)
    headings = re.compile(r"^#+ ", re.MULTILINE)
    assert [b for b in fences.findall(english) if b.startswith("```")] == [
        b for b in fences.findall(chinese) if b.startswith("```")
    ]
    assert len(headings.findall(english)) == len(headings.findall(chinese))


@pytest.mark.parametrize("document", ANSWERS)
def test_the_output_in_a_commands_page_is_what_the_command_prints(document: str) -> None:
    found = block("output").search((ROOT / document).read_text(encoding="utf-8"))
    assert found is not None, f"{document} has no block <!-- output -->"
    assert found.group(2) == ANSWERS[document](), "run: python tests/test_docs.py"


NAMES = [module.__name__.rpartition(".")[2].replace("_", "-") for module in COMMANDS]
SECTIONS = ["Usage", "Options", "Examples", "Example output", "Exit codes"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_page_in_the_fixed_order_with_all_its_options(name: str) -> None:
    text = (ROOT / "docs" / "commands" / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# vllm-fl {name}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    subparsers = next(a for a in build_parser()._actions if a.dest == "command")
    options = {
        option
        for action in subparsers.choices[name]._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }
    table = text.partition("## Options")[2].partition("## Examples")[0]
    assert set(re.findall(r"^\| `(--[\w-]+)", table, re.MULTILINE)) == options
    usage = text.partition("## Usage")[2].partition("## Options")[0]
    assert {option for option in options if option not in usage} == set()


def test_the_index_names_every_command() -> None:
    text = (ROOT / "docs" / "commands" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[`vllm-fl ([\w-]+)`\]\(\1\.md\)", text) == NAMES


def test_every_document_that_is_linked_exists() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_files_that_a_native_kernel_is_made_of_are_where_the_page_says() -> None:
    """The page draws the tree: a folder, then its files, two spaces further in."""
    text = (ROOT / "docs" / "native-kernels.md").read_text(encoding="utf-8")
    folder, named = ROOT, []
    for line in text.partition("## How")[0].splitlines():
        if not line.startswith("    "):
            continue
        names = re.match(r"\s*((?:[\w./]+(?:, )?)+)", line)
        assert names is not None, line
        if not line.startswith("      "):
            folder = ROOT
        first, *others = [folder / name for name in names[1].strip().split(", ")]
        named += [first, *(first.parent / other.name for other in others)]
        if names[1].strip().endswith("/"):
            folder = first
    assert len(named) > 20
    assert [path for path in named if not path.exists()] == []
    for path in re.findall(r"(?:benchmarks|csrc|tests|vllm_fl)/[\w/.]+\.\w+", text):
        assert (ROOT / path).exists() or path == "vllm_fl/_native.json", path


if __name__ == "__main__":
    for name in (*READMES, *ANSWERS):
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8"), name), encoding="utf-8")
