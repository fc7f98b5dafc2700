# SPDX-License-Identifier: Apache-2.0
"""Inputs of the contracts, and their verdict on what a function of vLLM gave."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from vllm_fl.ops.contract import OpContract
from vllm_fl.testing import worst_errors

__all__ = ["inputs", "right", "vllm_module"]


def inputs(contract: OpContract, name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The arguments of one of a contract's cases."""
    [case] = [case for case in contract.cases if case.name == name]
    return case.make(dtype, torch.Generator().manual_seed(3))


def right(
    contract: OpContract, result: Any, args: tuple[Any, ...], dtype: torch.dtype = torch.float32
) -> bool:
    """Whether outputs are within the contract's tolerance of the exact ones."""
    limits = contract.tolerances[dtype]
    errors = worst_errors(contract, result, args)
    return all(error <= limits.for_output(i) for i, error in enumerate(errors))


def vllm_module(name: str) -> Any:
    """A module of vLLM, whose import may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"vllm.{name}")
