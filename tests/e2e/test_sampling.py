# SPDX-License-Identifier: Apache-2.0
"""Repetition penalties, top-k and top-p: vllm_fl serves the functions that vLLM's sampler calls,
and in float32 that changes no token."""

import random

import pytest

pytestmark = pytest.mark.e2e

EACH = (
    {},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 2, "top_p": 0.8},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "seed": 4, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5},
)
PROMPT = random.Random(0).choices(range(1024), k=64)
REQUEST = {"prompts": [PROMPT] * len(EACH), "each": EACH, "max_tokens": 32, "logprobs": False}

PENALTIES, CHOICE = "apply_repetition_penalties", "apply_top_k_top_p"
VARIABLE = "(from environment variable VLLM_FL_PER_OP)"
FORCED = {"VLLM_FL_PER_OP": f"{PENALTIES}=reference;{CHOICE}=reference"}
NATIVE = {"VLLM_FL_PER_OP": f"{PENALTIES}=native;{CHOICE}=native"}
MIXED = {"VLLM_FL_PER_OP": f"{PENALTIES}=native", "VLLM_FL_OOT_BLACKLIST": CHOICE}

each_choice = pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default"),
        pytest.param(FORCED, id="forced"),
        pytest.param(NATIVE, id="native", marks=pytest.mark.extended),
        pytest.param(MIXED, id="mixed", marks=pytest.mark.extended),
    ],
)


def rows(reply) -> dict[str, dict[str, object]]:
    [rank] = reply["routes"]
    found = [row for row in rank["ops"] if row["op"] in (PENALTIES, CHOICE)]
    assert len(found) == 2, found
    return {row["op"]: row for row in found}


def test_every_request_is_sampled_in_its_own_way(engine) -> None:
    tokens = engine.stock("tiny", **REQUEST)["tokens"]
    assert [len(sampled) for sampled in tokens] == [32] * len(EACH)
    assert len({tuple(sampled) for sampled in tokens}) == len(EACH)  # of one and the same prompt


@each_choice
def test_float32_tokens_equal_those_of_vllm_alone(engine, changes) -> None:
    ours, theirs = engine("tiny", changes, **REQUEST), engine.stock("tiny", **REQUEST)
    assert ours["tokens"] == theirs["tokens"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, "highest priority available (50)", id="default"),
        pytest.param(FORCED, f"the order for {{op}} names it {VARIABLE}", id="forced"),
    ],
)
def test_the_route_table_shows_what_serves_the_sampler_and_how_often(
    engine, changes, reason
) -> None:
    for op, row in rows(engine("tiny", changes, **REQUEST)).items():
        assert (row["impl_id"], row["kind"]) == ("reference.torch", "reference")
        assert row["reason"] == reason.format(op=op)
        assert (row["bound"], row["mode"]) == (1, "eager")
        assert row["calls"] == 4  # once a step, for the whole batch


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            NATIVE,
            {op: f"the order for {op} names native {VARIABLE}" for op in (PENALTIES, CHOICE)},
        ),
        (
            MIXED,
            {
                PENALTIES: f"the order for {PENALTIES} names native {VARIABLE}",
                CHOICE: "the OOT lists leave it native",
            },
        ),
    ],
    ids=["native", "mixed"],
)
def test_functions_that_stay_native_are_untouched_and_say_why(engine, changes, reasons) -> None:
    reply = engine("tiny", changes, **REQUEST)
    found = rows(reply)
    assert {op: row["reason"] for op, row in found.items()} == reasons
    assert {(row["impl_id"], row["calls"]) for row in found.values()} == {("native", 0)}
    assert not [name for name in reply["vllm"]["hooks"] if PENALTIES in name or CHOICE in name]


def test_greedy_requests_have_no_such_rows(engine) -> None:
    [rank] = engine("demo")["routes"]
    assert not {PENALTIES, CHOICE} & {row["op"] for row in rank["ops"]}
