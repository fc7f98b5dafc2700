# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer's memcheck over our kernels: three points of each, every call checked.

    PYTHONPATH=$HOME/site python benchmarks/gpu/memcheck.py OUT.json

runs itself again under compute-sanitizer, without PyTorch's memory cache, so that a byte beside a
tensor is outside of every allocation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from about import about, write_json

POINTS = {1, 32, 128}
SIZES = {4096, "32/8"}
FOUND = 99
"""The exit code of compute-sanitizer where it found something."""
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer")


def sanitizer() -> str | None:
    """Where it is."""
    return shutil.which("compute-sanitizer") or next(
        (place for place in PLACES if Path(place).is_file()), None
    )


def calls(device: str) -> int:
    """Call each kernel at its points, and compare; 1 where one is wrong or none ran."""
    import torch
    from kernel_points import points
    from kernels import Refused, candidate, check, copies, reference_of

    ran = wrong = 0
    with torch.inference_mode():
        for point in points():
            three = point.tokens in POINTS | {512} and point.size in SIZES
            if not three or point.dtype != "bfloat16":
                continue
            what = f"{point.group} {point.size} {point.tokens} tokens"
            with torch.device(device):
                args = point.make()
            try:
                expected = reference_of(point)(*copies(args))
                check(point, candidate("ours", point, args), args, expected)
                ran += 1
                print(f"CALL {what}: right", flush=True)
            except Refused as error:
                wrong += "WRONG" in str(error)
                print(f"CALL {what}: {error}", flush=True)
    return int(wrong > 0 or not ran)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found.add_argument("out", type=Path)
    found.add_argument("--device", default="cuda")
    found.add_argument("--calls", action="store_true", help="only make the calls")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the calls under compute-sanitizer, and write down what it said."""
    arguments = parser().parse_args(argv)
    if arguments.calls:
        return calls(arguments.device)
    tool = sanitizer() if arguments.device == "cuda" else None
    prefix = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND)] if tool else []
    start = time.monotonic()
    command = [*prefix, sys.executable, __file__, str(arguments.out), "--calls"]
    done = subprocess.run(
        [*command, "--device", arguments.device],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    report: dict[str, Any] = {
        "about": about(arguments.device),
        "tool": tool or "none was found: the calls ran without",
        "rc": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "calls": [line.removeprefix("CALL ") for line in lines if line.startswith("CALL ")],
        "said": [line for line in lines if line.startswith("=========")][:200],
        "tail": lines[-20:],
    }
    write_json(arguments.out, report)
    said = report["said"][-1:] or report["tail"][-1:]
    print(f"MEMCHECK rc {done.returncode}, {len(report['calls'])} calls: {' '.join(said)}")
    return 0 if done.returncode == 0 and tool else 1


if __name__ == "__main__":
    sys.exit(main())
