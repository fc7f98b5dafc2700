# SPDX-License-Identifier: Apache-2.0
"""Finds an op's contract: vllm_fl's own, or the one that a vendor's package ships.

A vendor that declares an op of its own puts its contract into a tuple called CONTRACTS, in the
module of the function that implements it or in a package above.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator

from ..dispatch.types import OpImpl
from ..ops import CONTRACTS
from ..ops.contract import OpContract

__all__ = ["contract_at", "contract_of", "home_of"]

_OURS = "vllm_fl.ops"


def contract_of(op_name: str, impls: Iterable[OpImpl] = ()) -> OpContract | None:
    """The contract of an op, looked for beside its implementations too; None if there is none."""
    for contract in CONTRACTS:
        if contract.name == op_name:
            return contract
    for impl in impls:
        for module in _modules_of(impl):
            found = _in_module(module, op_name)
            if found is not None:
                return found
    return None


def home_of(contract: OpContract, impl: OpImpl) -> str | None:
    """The module whose CONTRACTS holds a contract, for another process to find it; or None."""
    for module in (_OURS, *_modules_of(impl)):
        if _in_module(module, contract.name) is contract:
            return module
    return None


def contract_at(module: str, op_name: str) -> OpContract:
    """The contract of an op in a module's CONTRACTS.

    Raises:
        LookupError: there is none.
    """
    importlib.import_module(module)
    found = _in_module(module, op_name)
    if found is None:
        raise LookupError(f"{module}.CONTRACTS holds no contract for {op_name}")
    return found


def _modules_of(impl: OpImpl) -> Iterator[str]:
    """The module of the implementation's function, and the packages above it."""
    function = getattr(impl.fn, "__func__", impl.fn)
    parts = (getattr(function, "__module__", None) or "").split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count])


def _in_module(module: str, op_name: str) -> OpContract | None:
    contracts = getattr(sys.modules.get(module), "CONTRACTS", ())
    if not isinstance(contracts, tuple | list):
        return None
    matching = (c for c in contracts if isinstance(c, OpContract) and c.name == op_name)
    return next(matching, None)
