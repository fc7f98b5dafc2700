# SPDX-License-Identifier: Apache-2.0
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]


@pytest.mark.parametrize("processes", ["0", "1"], ids=["in_process", "own_process"])
def test_an_error_of_an_implementation_names_it_and_what_it_was_called_with(
    engine, request, processes
) -> None:
    changes = {
        "VLLM_FL_PLUGIN_MODULES": "broken_vendor",
        "VLLM_FL_PER_OP": "silu_and_mul=vendor:broken",
        "PYTHONPATH": str(request.path.parent),
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
    }
    log = engine("tiny", changes, fails=True)["log"]
    assert "RuntimeError: the kernel broke" in log
    assert (
        "vllm_fl: raised by implementation 'vendor.broken' of op 'silu_and_mul', "
        "called with float32["
    ) in log
    assert ", 1024] strides [1024, 1]. No other implementation was tried" in log
