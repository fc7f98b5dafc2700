# SPDX-License-Identifier: Apache-2.0
"""FlagGems' kernels, interpreted; `make test-flaggems` has what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest

from tests.backends.flaggems import interpreter
from vllm_fl.backends.flaggems import register_ops
from vllm_fl.dispatch.types import OpImpl


@pytest.fixture(scope="session")
def gems() -> Mapping[str, OpImpl]:
    """Op name to FlagGems' implementation, ready to be called."""
    absence = interpreter.absence()
    if absence is not None:
        pytest.skip(absence)
    interpreter.load()
    return MappingProxyType({i.op_name: i for i in register_ops.backend.implementations})
