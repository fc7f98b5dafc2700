# SPDX-License-Identifier: Apache-2.0
"""Beside vllm-ascend: what is known of it, and when it is in charge."""

from __future__ import annotations

import sys
import types

import pytest

from vllm_fl.backends.vendor.ascend.beside import CLAIMED, claims, platform_is_active
from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch import OpManager
from vllm_fl.dispatch.config import Config


@pytest.fixture
def platform(monkeypatch):
    """platform("vllm_ascend.platform", "NPUPlatform") is the platform that vLLM chose."""

    def choose(module: str, name: str) -> None:
        chosen = type(name, (), {"__module__": module})()
        fake = types.SimpleNamespace(_current_platform=chosen)
        monkeypatch.setitem(sys.modules, "vllm.platforms", fake)

    return choose


def test_it_is_active_where_vllm_chose_its_platform(platform):
    platform("vllm_ascend.platform", "NPUPlatform")
    assert platform_is_active()
    assert claims("RMSNorm") == "vllm-ascend claims RMSNorm on its platform"
    assert claims("GeluAndMul") is None


@pytest.mark.parametrize(
    "module, name",
    (("vllm.platforms.cpu", "CpuPlatform"), ("acme.platform", "NPUPlatform")),
)
def test_beside_another_platform_nothing_is_claimed(platform, module, name):
    platform(module, name)
    assert not platform_is_active()
    assert claims("RMSNorm") is None


def test_without_vllm_nothing_is_claimed(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm.platforms", raising=False)
    assert claims("RMSNorm") is None


def test_the_name_that_it_misspells_is_known_as_it_is_written():
    assert len(CLAIMED) == 28
    assert "SiluAndMulClamp" in CLAIMED and "SiluAndMulWithClamp" not in CLAIMED


def selected(**question: bool) -> tuple[str | None, str]:
    """(what is selected, why vendor.ascend is not)."""
    manager = OpManager(config=Config(), device=facts_of("ascend", assumed=False))
    [impl] = [i for i in _all(manager) if i.impl_id == "vendor.ascend"]
    verdict = impl.supports(**question)
    return (impl.fn(**question), "") if verdict is True else (None, verdict)


def _all(manager: OpManager):
    manager.ensure_initialized()
    return manager.registry.get_implementations("attention_backend")


@pytest.mark.parametrize(
    "question, expected",
    (
        ({}, "vllm_ascend.attention.attention_v1.AscendAttentionBackend"),
        ({"use_mla": True}, "vllm_ascend.attention.mla_v1.AscendMLABackend"),
        ({"use_mla": True, "use_sparse": True}, "vllm_ascend.attention.sfa_v1.AscendSFABackend"),
    ),
    ids=str,
)
def test_the_selector_names_its_class_on_its_platform(platform, question, expected):
    platform("vllm_ascend.platform", "NPUPlatform")
    assert selected(**question) == (expected, "")


def test_the_selector_refuses_in_words(platform):
    platform("vllm_ascend.platform", "NPUPlatform")
    assert selected(use_sparse=True) == (None, "sparse attention exists with MLA only")
    platform("vllm.platforms.cpu", "CpuPlatform")
    assert selected() == (
        None,
        "vllm-ascend's platform is not the one that vLLM chose, and its classes need it",
    )
