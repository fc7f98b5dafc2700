# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels themselves, where there is no GPU: compiled for the CPU, where the threads of a
block are fibers. What they compute, which addresses they touch and where they wait is as on a GPU;
how fast they are, and what only its compiler can do wrong, is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.vendor.cuda.emulated.build import build, compiler

ROOT = Path(__file__).parents[4]


@pytest.mark.extended
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_the_kernels_are_right_and_no_launch_batch_or_address_changes_a_bit(tmp_path) -> None:
    library = build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.vendor.cuda.emulated.check", str(library)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
