# SPDX-License-Identifier: Apache-2.0
"""vLLM itself chooses among the platforms that are offered to it, ours and another package's."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STAND_IN = HERE.parents[1] / "e2e" / "standin_ascend"
"""A package with the entry points that vllm-ascend has."""


@pytest.fixture
def start(tmp_path: Path):
    """start(...) is what vLLM chose, and what was logged, under these variables."""
    # An installation in place may be older than the entry points that this tree declares.
    declared = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())["project"]
    points = declared["entry-points"]["vllm.platform_plugins"]
    installed = tmp_path / "vllm_fl-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-fl\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.platform_plugins]", *lines]))

    def start(**variables: str) -> tuple[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith("VLLM_")}
        paths = [str(tmp_path), str(STAND_IN), kept.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, str(HERE / "beside_another.py")],
            env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        chosen = [ln for ln in done.stdout.splitlines() if ln.startswith(("chosen", "raised"))]
        return chosen[0], done.stderr

    return start


def test_the_other_plugins_platform_is_chosen_and_ours_says_in_one_line_that_it_stays_back(
    start,
) -> None:
    chosen, log = start()
    assert chosen == "chosen vllm_ascend.platform.NPUPlatform"
    line = "vllm_fl's platform stays back: the platform plugin 'ascend' is active"
    assert [text for text in log.splitlines() if "vllm_fl's platform" in text] == [
        f"vllm_fl INFO: {line}"
    ]


def test_asked_for_beside_another_one_vllm_refuses_and_the_way_out_was_logged(start) -> None:
    chosen, log = start(VLLM_FL_PLATFORM="ascend")
    assert chosen.startswith("raised RuntimeError: Only one platform plugin can be activated")
    assert "Set VLLM_PLUGINS to leave one out." in log


@pytest.mark.extended
def test_where_vllm_may_not_load_the_other_one_ours_is_chosen(start) -> None:
    chosen, log = start(VLLM_PLUGINS="fl")
    assert chosen == "chosen vllm_fl.vllm_plugin.platform.PlatformFL"
    assert "vllm_fl's platform steps in: vLLM has no platform for ascend" in log
