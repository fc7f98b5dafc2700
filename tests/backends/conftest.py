# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the backends."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def vllm_layers() -> Iterator[SimpleNamespace]:
    """vLLM's layer classes, inside a configuration that lets them be built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM and what it imports warn of themselves
        pytest.importorskip("vllm")
        from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

        config = VllmConfig(compilation_config=CompilationConfig(mode=0))
        with set_current_vllm_config(config):
            from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
            from vllm.model_executor.layers.layernorm import RMSNorm
            from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

            yield SimpleNamespace(
                GeluAndMul=GeluAndMul,
                SiluAndMul=SiluAndMul,
                RMSNorm=RMSNorm,
                RotaryEmbedding=RotaryEmbedding,
            )


@pytest.fixture(scope="session")
def kernels() -> Any:
    """torch.ops._C of a CPU build of vLLM, loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_fl.backends.vendor.cpu.cpu import backend

        available = backend.is_available()
        if available is not True:
            pytest.skip(f"vLLM's CPU kernels: {available}")
        backend.load()
    return torch.ops._C


@pytest.fixture(scope="session")
def aligned_stores(kernels: Any) -> None:
    """Skips where bfloat16 is not served, or may be stored anywhere without harm."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("bfloat16 vectors may be stored anywhere on this machine")
    from vllm_fl.backends.vendor.cpu.impl.common import DTYPES

    if torch.bfloat16 not in DTYPES:
        pytest.skip("bfloat16 is not served without AVX512_BF16")
