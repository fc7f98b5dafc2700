# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_fl.vllm_plugin.compile import layer_mode


@pytest.mark.parametrize(
    ("mode", "expected"), [(0, "eager"), (1, "compiled"), (2, "compiled"), (3, "compiled")]
)
def test_compiled_is_whatever_dynamo_traces(current_config, mode, expected) -> None:
    with current_config(mode=mode):
        assert layer_mode() == expected


def test_vllms_default_is_compiled(current_config) -> None:
    with current_config(custom_ops=[]):
        assert layer_mode() == "compiled"


def test_without_a_configuration_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests' fixtures may hold one for the session.
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", None)
    with pytest.raises(AssertionError, match="config is not set"):
        layer_mode()
