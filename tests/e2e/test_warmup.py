# SPDX-License-Identifier: Apache-2.0
"""A kernel that is compiled at its first call meets no request before it was."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

LENGTHS = (1, 7, 16, 33, 64, 100)
PROMPTS = [list(range(1, length + 1)) for length in LENGTHS]
WARM = "vllm_fl INFO: warmed up at "


@pytest.fixture
def kinds(engine, request):
    """kinds(...) are the kinds that were compiled, before and after the worker was warm."""

    def kinds(**changes: str) -> tuple[list[str], list[str]]:
        log = engine(
            "tiny",
            {
                "VLLM_FL_PLUGIN_MODULES": "compiling_vendor",
                "VLLM_FL_PER_OP": "silu_and_mul=vendor:compiling",
                "PYTHONPATH": str(request.path.parent),
                **changes,
            },
            prompts=PROMPTS,
            max_tokens=4,
            logprobs=False,
        )["log"]
        lines = log.splitlines()
        at = next((i for i, line in enumerate(lines) if WARM in line), -1)
        parts = lines[: at + 1], lines[at + 1 :]
        before, after = ([p for p in part if p.startswith("compiled kind ")] for part in parts)
        return before, after

    return kinds


def test_every_kind_that_requests_meet_was_compiled_before_them(kinds) -> None:
    before, after = kinds()
    assert after == []
    never_warm, met = kinds(COMPILES_UNANNOUNCED="1")
    assert never_warm == []  # who does not say that it compiles is not warmed up
    assert len(met) >= 3 and set(met) <= set(before)
