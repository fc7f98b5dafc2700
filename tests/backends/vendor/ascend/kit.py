# SPDX-License-Identifier: Apache-2.0
"""The conformance kit over vendor.ascend: `python -m tests.backends.vendor.ascend.kit [OP ...]`.

The kit watches memory by its addresses, which tensors that only report the device "npu" do not
have: here the operators get CPU tensors, and the backend says that it takes them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tests.backends.vendor.ascend.harness import install
from tests.backends.vendor.ascend.served import NOT_FOR, SERVED
from vllm_fl.backends.vendor.ascend.ascend import AscendBackend
from vllm_fl.testing import check_implementation


def main(names: list[str]) -> int:
    """Print a line for each implementation; 1 if one of them fails."""
    install(device="cpu")
    AscendBackend.device_types = ("npu", "cpu")
    failed = False
    for contract, impl in SERVED:
        if names and contract.name not in names:
            continue
        dtypes = [d for d in contract.tolerances if (contract.name, d) not in NOT_FOR]
        report = check_implementation(
            replace(impl, origin=None), contract=contract, dtypes=dtypes, device="cpu"
        )
        failed |= not report.passed
        ran = sum(not case.reason for case in report.results)
        print(f"{contract.name:28} {ran} cases, {'passed' if report.passed else 'FAILED'}")
        for failure in report.failures:
            print(f"  {failure}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
