# SPDX-License-Identifier: Apache-2.0
"""From nothing to a checked vendor package, by four commands in an environment of its own."""

import shutil
import sys
import sysconfig
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

SECONDS = 90
TUTORIAL = Path(__file__).parents[2] / "docs" / "add-a-vendor.md"
MORE = [
    line.strip()
    for line in TUTORIAL.read_text().partition("<!-- end -->")[2].splitlines()
    if line.startswith("    vllm-fl ")
]
"""What the tutorial runs behind its first four commands; the demo aside, which fetches a model."""


@pytest.fixture
def scratch(run, tmp_path) -> Path:
    """The interpreter of a new environment, which sees the packages of this one."""
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    print_purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(run([python, "-c", print_purelib]).stdout.strip())
    below = sysconfig.get_path("purelib")
    (purelib / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    return python


def test_four_commands_make_install_test_and_check_a_package(run, scratch, tmp_path) -> None:
    cli = [scratch, "-m", "vllm_fl.cli.main"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", scratch]
    package = tmp_path / "vllm-plugin-acme"
    start = time.monotonic()
    run([*cli, "new-vendor", "acme", "--directory", tmp_path])
    # What the environment below has is not to be looked for in an index.
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "install", *offline, package])
    tested = run([scratch, "-m", "pytest", "-p", "no:cacheprovider", package])
    checked = run([*cli, "check-vendor", "vllm_fl_acme"])
    seconds = time.monotonic() - start
    assert "6 passed" in tested.stdout
    assert "vllm_fl_acme: all 13 items are there" in checked.stdout
    assert seconds < SECONDS, f"{seconds:.0f} s"
    # The rest of the tutorial's commands, in the environment that the four left.
    for command in MORE:
        run([*cli, *command.split()[1:]])


def test_the_tutorial_has_the_commands_that_are_run_here() -> None:
    assert [command.split()[1] for command in MORE] == ["explain", "verify", "bench"]


def test_what_was_written_runs_in_real_vllm(run, engine, scratch, tmp_path) -> None:
    """And a built-in vendor would, by the same files."""
    cli = [sys.executable, "-m", "vllm_fl.cli.main"]
    run([*cli, "new-vendor", "acme", "--directory", tmp_path])
    source = shutil.copytree(tmp_path / "vllm-plugin-acme", tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", scratch]
    run([*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", source])
    ops = ("rms_norm", "rotary_embedding", "silu_and_mul")
    order = {"VLLM_FL_PER_OP": ";".join(f"{op}=vendor:acme" for op in ops)}
    reply = engine("tiny", order, python=scratch)
    rows = {row["op"]: row for row in reply["routes"][0]["ops"]}
    assert {rows[op]["impl_id"] for op in ops} == {"vendor.acme"}
    assert reply["tokens"] == engine.stock("tiny")["tokens"]
