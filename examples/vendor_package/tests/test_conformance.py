# SPDX-License-Identifier: Apache-2.0
"""Acme's implementations keep their ops' contracts: pytest --vllm-fl-vendor acme"""


def test_conformance(vllm_fl_case):
    vllm_fl_case.check()
