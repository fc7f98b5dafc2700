# SPDX-License-Identifier: Apache-2.0
"""The parts of the documents that come from the code are equal to it.

`python tests/test_docs.py` writes them anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.dispatch.config import SETTINGS

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README_zh.md")
VENDOR = "examples/vendor_package/vllm_fl_acme/__init__.py"


def settings_table() -> str:
    """The configuration table in Markdown."""
    rows = ["| Variable | YAML key | Value | What it does |", "|---|---|---|---|"]
    for setting in SETTINGS:
        key = f"`{setting.name}`" if setting.from_data is not None else ""
        default = f" (default {setting.default})" if setting.default else ""
        form = setting.form.replace("|", "\\|")
        summary = setting.summary.replace("<", "&lt;")
        rows.append(f"| `{setting.variable}` | {key} | {form}{default} | {summary} |")
    return "\n".join(rows)


def vendor_module() -> str:
    """The example package's module as a code block, without its license line."""
    lines = (ROOT / VENDOR).read_text(encoding="utf-8").splitlines()
    code = "\n".join(line for line in lines if not line.startswith("# SPDX")).strip()
    return f"```python\n{code}\n```"


GENERATED = {"settings": settings_table, f"vendor: {VENDOR}": vendor_module}


def block(name: str) -> re.Pattern[str]:
    """The marked block: from its opening comment to its closing one."""
    opening = re.escape(f"<!-- {name} -->")
    return re.compile(rf"({opening}\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """A document with its generated blocks made anew."""
    for name, render in GENERATED.items():
        text = block(name).sub(lambda m, r=render: m.group(1) + r() + m.group(3), text)
    return text


@pytest.mark.parametrize("readme", READMES)
@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_block_is_there_and_equal_to_the_code(readme: str, name: str) -> None:
    found = block(name).search((ROOT / readme).read_text(encoding="utf-8"))
    assert found is not None, f"{readme} has no block <!-- {name} -->"
    assert found.group(2) == GENERATED[name](), "run: python tests/test_docs.py"


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
    assert result.stdout.splitlines()[: len(expected)] == expected


def test_the_two_readmes_hold_the_same_code_and_headings() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    fences = re.compile(r"```.*?```|^    \S.*$", re.DOTALL | re.MULTILINE)
    headings = re.compile(r"^#+ ", re.MULTILINE)
    assert [b for b in fences.findall(english) if b.startswith("```")] == [
        b for b in fences.findall(chinese) if b.startswith("```")
    ]
    assert len(headings.findall(english)) == len(headings.findall(chinese))


def test_every_document_that_is_linked_exists() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


if __name__ == "__main__":
    for name in READMES:
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
