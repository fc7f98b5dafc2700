# SPDX-License-Identifier: Apache-2.0
import os

import pytest

from tests.native import CPU_IMPL, NATIVE

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="each rank needs a core of its own")
def test_two_ranks_have_equal_route_tables_and_the_tokens_of_one(engine) -> None:
    changes = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}",
    }
    reply = engine("tiny", changes, tensor_parallel_size=2)
    first, second = reply["routes"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["pid"] != second["pid"]
    assert first["ops"] == second["ops"]
    for row in first["ops"]:
        if row["reason"].startswith("vLLM's own"):
            continue  # a function
        if row["op"] == "fused_qk_norm_rope" and not NATIVE:
            continue  # vLLM has no kernel of it for CPUs
        assert row["impl_id"] == CPU_IMPL
        assert row["calls"] > 0 or row["reason"] == "part of fused_qk_norm_rope"
    assert reply["tokens"] == engine("tiny")["tokens"]
