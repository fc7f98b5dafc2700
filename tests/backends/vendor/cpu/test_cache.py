# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernel for the latent cache on CPUs: it confirms the op, and it is not served.

It knows packed caches of half precision alone. No layer of vLLM on CPU comes to it through the
function that the op replaces.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.helpers import bits, in_child
from vllm_fl.ops.cache import CONCAT_AND_CACHE_MLA


@pytest.fixture
def kernel(kernels: Any) -> Any:
    if not hasattr(kernels, "concat_and_cache_mla_cpu"):
        pytest.skip("this release of vLLM has no such kernel")
    return kernels.concat_and_cache_mla_cpu


def cases(dtype: torch.dtype):
    for case in CONCAT_AND_CACHE_MLA.cases_for(dtype):
        args = case.make(dtype, torch.Generator().manual_seed(3))
        if args[4] == "auto" and args[0].shape[0] == args[3].shape[0]:
            yield case.name, args


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_packed_latent_cache_is_what_vllms_kernel_makes_of_it(kernel, dtype) -> None:
    compared = 0
    for name, args in cases(dtype):
        if args[2].is_contiguous():
            theirs = args[2].clone()
            kernel(args[0], args[1], theirs, args[3])
            assert torch.equal(bits(CONCAT_AND_CACHE_MLA.reference(*args)), bits(theirs)), name
            compared += 1
    assert compared > 10


def test_a_cache_with_strides_of_its_own_is_written_elsewhere_by_vllms_kernel(kernel) -> None:
    strided = [(n, a) for n, a in cases(torch.bfloat16) if not a[2].is_contiguous()]
    assert {name for name, _ in strided} == {"blocks with gaps between them", "permuted cache"}
    for name, args in strided:

        def differs(args: tuple[Any, ...] = args) -> bool:
            expected = CONCAT_AND_CACHE_MLA.reference(*args)
            kernel(args[0], args[1], args[2], args[3])
            return not torch.equal(args[2], expected)

        assert in_child(differs) == "returned True", name
