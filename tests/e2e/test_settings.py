# SPDX-License-Identifier: Apache-2.0
"""Every way to say what should run shows in the workers' route table."""

from typing import Any

import pytest

from tests.native import CPU_IMPL, CPU_NAMESPACE, CPU_PRIORITY, NATIVE, rejected

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

ADDITIONAL = {"prefer": "reference", "op_backends": {"rms_norm": ["vendor:cpu"]}}
KERNEL = (CPU_IMPL, f"highest priority available ({CPU_PRIORITY})")
DEFAULT = {
    "fused_add_rms_norm": KERNEL,
    "rms_norm": KERNEL,
    "rotary_embedding": KERNEL,
    "silu_and_mul": KERNEL,
}

FUSED = "fused_qk_norm_rope"
PART = f"part of {FUSED}"
ONE_BY_ONE = "nothing takes the place of the layers: they run one by one"


def table(expected: dict[str, tuple[str, str]], apart: str = "") -> set[tuple[str, str, str]]:
    """Every row's op, implementation and reason.

    Args:
        expected: those of the ops of `DEFAULT`.
        apart: why no kernel does the norms and the rotary embedding of a head in one.
    """
    rows = {(op, *row) for op, row in expected.items()}
    if not NATIVE:
        apart = apart or ONE_BY_ONE
    if apart:
        return rows | {(FUSED, "native", apart)}
    rows -= {("rotary_embedding", *expected["rotary_embedding"])}  # nobody else calls it
    return (
        rows
        | {(FUSED, *KERNEL)}
        | {(op, CPU_IMPL, PART) for op in ("rms_norm", "rotary_embedding")}
    )


def layers(reply: Any) -> list[dict[str, Any]]:
    """The rows of the layers and modules; there are functions too."""
    [rank] = reply["routes"]
    return [row for row in rank["ops"] if row["op"] in {*DEFAULT, FUSED}]


def variable(name: str) -> str:
    return f"(from environment variable {name})"


def additional(key: str) -> str:
    return f"(from --additional-config vllm_fl.{key})"


def everywhere(impl_id: str, reason: str) -> dict[str, tuple[str, str]]:
    return {op: (impl_id, reason) for op in DEFAULT}


@pytest.mark.parametrize(
    ("changes", "llm", "expected", "apart"),
    [
        pytest.param({}, {}, {}, "", id="default"),
        pytest.param(
            {"VLLM_FL_PREFER": "reference"},
            {},
            everywhere("reference.torch", f"prefer = reference {variable('VLLM_FL_PREFER')}"),
            ONE_BY_ONE,
            id="prefer",
        ),
        pytest.param(
            {"VLLM_FL_DENY_VENDORS": "cpu"},
            {},
            everywhere("reference.torch", "highest priority available (50)"),
            ONE_BY_ONE,
            id="deny_vendors",
        ),
        pytest.param(
            {"VLLM_FL_PER_OP": "rms_norm=native"},
            {},
            {
                "rms_norm": (
                    "native",
                    f"the order for rms_norm names native {variable('VLLM_FL_PER_OP')}",
                )
            },
            ONE_BY_ONE,
            id="per_op",
        ),
        pytest.param(
            {},
            {"compilation_config": {"custom_ops": ["all", "-silu_and_mul"]}},
            {"silu_and_mul": ("native", "custom_ops disables it")},
            "",
            id="custom_ops",
        ),
        pytest.param(
            {"VLLM_FL_OOT_BLACKLIST": "rotary_embedding"},
            {},
            {"rotary_embedding": ("native", "the OOT lists leave it native")},
            "its rotary_emb is native: the OOT lists leave it native",
            id="oot_blacklist",
        ),
        pytest.param(
            {},
            {"additional_config": {"vllm_fl": ADDITIONAL}},
            everywhere("reference.torch", f"prefer = reference {additional('prefer')}")
            | {
                "rms_norm": (
                    CPU_IMPL,
                    f"the order for rms_norm names it {additional('op_backends')}",
                )
            },
            ONE_BY_ONE,
            id="additional_config",
        ),
    ],
)
def test_a_setting_shows_in_the_route_table(engine, changes, llm, expected, apart) -> None:
    reply = engine("tiny", changes, **llm)
    rows = layers(reply)
    found = [(row["op"], row["impl_id"], row["reason"]) for row in rows]
    assert set(found) == table(DEFAULT | expected, apart)
    assert len(found) == len(set(found))
    for row in rows:
        assert row["bound"] > 0
        assert (row["calls"] > 0) == (row["impl_id"] != "native" and row["reason"] != PART)
        kernel = f"{CPU_NAMESPACE}::{row['op']}"
        # vLLM's own forward calls the rotary kernel too.
        if row["op"] != "rotary_embedding" and row["reason"] != PART:
            assert (kernel in reply["operators"]) == (row["impl_id"] == CPU_IMPL)


def test_what_a_setting_rejects_is_in_the_table(engine) -> None:
    for row in layers(engine("tiny", {"VLLM_FL_DENY_VENDORS": "cpu"})):
        if row["op"] == FUSED:
            continue
        assert row["rejected"] == [
            {"impl_id": impl_id, "reason": "deny_vendors holds 'cpu'"}
            for impl_id in ("vendor.cpu.fl", "vendor.cpu")
        ]


def test_batch_invariance_rejects_what_is_not_marked_for_it(engine) -> None:
    # Without the log-probabilities: for those vLLM then calls a Triton kernel, on CPUs too. It
    # does so for its own norms as well, and by itself ends there.
    reply = engine("tiny", {"VLLM_BATCH_INVARIANT": "1"}, logprobs=False)
    reason = "VLLM_BATCH_INVARIANT is on and it is not marked batch-invariant"
    [rank] = reply["routes"]
    rows = layers(reply)
    assert {(row["op"], row["impl_id"], row["reason"]) for row in rows} == table(DEFAULT)
    for row in (row for row in rows if row["impl_id"] != "native" and row["reason"] != PART):
        assert {"impl_id": "reference.torch", "reason": reason} in rejected(row)
    for row in rank["ops"]:  # of the sampling functions there is only the reference here
        if row["op"].startswith("apply_"):
            assert row["impl_id"] == "native" and reason in row["reason"]
    assert reply["tokens"] == engine("tiny")["tokens"]


WRONG = 'unknown kind "cuda"; valid: flagos, vendor, reference.'


@pytest.mark.parametrize("processes", ["0", "1"], ids=["in_process", "own_process"])
@pytest.mark.parametrize(
    ("changes", "llm", "text"),
    [
        pytest.param(
            {"VLLM_FL_PREFER": "cuda"},
            {},
            f'ConfigError: environment variable VLLM_FL_PREFER="cuda": {WRONG}',
            id="variable",
        ),
        pytest.param(
            {},
            {"additional_config": {"vllm_fl": {"prefer": "cuda"}}},
            f"ConfigError: --additional-config vllm_fl.prefer: prefer: {WRONG}",
            id="additional_config",
        ),
    ],
)
def test_a_wrong_setting_stops_vllm_at_start(engine, changes, llm, text, processes) -> None:
    changes = changes | {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    assert text in engine("tiny", changes, fails=True, **llm)["log"]
