# SPDX-License-Identifier: Apache-2.0
import functools
import types

import pytest

from vllm_fl.backends.vendor.devices import facts_of
from vllm_fl.dispatch.types import DeviceFacts, VendorInfo
from vllm_fl.vllm_plugin import features
from vllm_fl.vllm_plugin.features import batch_invariant, platform_device, platform_has_kernels


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch):
    """platform(is_cuda=True) makes vLLM's platform one that answers so."""
    import vllm.platforms

    names = ("is_cpu", "is_cuda", "is_rocm", "is_xpu", "is_cuda_alike")

    def platform(device_type: str = "", **answers: bool) -> None:
        fake = types.SimpleNamespace(device_type=device_type)
        for name in names:
            setattr(fake, name, functools.partial(answers.get, name, False))
        monkeypatch.setattr(vllm.platforms, "current_platform", fake)

    return platform


def test_the_platform_of_this_vllm_is_the_cpu_and_brings_no_kernels_for_its_layers() -> None:
    device = platform_device()
    assert (device.vendor, device.device_type) == ("cpu", "cpu")
    assert platform_has_kernels() is False


@pytest.mark.parametrize(
    ("answers", "vendor", "device_type"),
    [
        ({"is_cpu": True}, "cpu", "cpu"),
        ({"is_cuda": True}, "cuda", "cuda"),
        ({"is_rocm": True}, "rocm", "cuda"),
        ({"is_xpu": True}, "xpu", "xpu"),
        ({"device_type": "npu"}, "ascend", "npu"),
        ({"device_type": "musa"}, "mthreads", "musa"),
        ({"device_type": "brandnew"}, "brandnew", "brandnew"),
    ],
    ids=str,
)
def test_the_device_follows_from_the_platform(platform, answers, vendor, device_type) -> None:
    platform(**answers)
    assert (platform_device().vendor, platform_device().device_type) == (vendor, device_type)


def test_a_device_type_that_a_plugin_declares_is_that_vendors(platform) -> None:
    platform(device_type="brandnew")
    known = {"acme": VendorInfo("acme", "brandnew")}
    assert platform_device(known) == DeviceFacts("acme", "brandnew")


@pytest.mark.parametrize(
    ("found", "vendor"),
    [("metax", "metax"), ("hygon", "hygon"), ("ascend", "cuda"), ("cpu", "cuda")],
)
def test_a_vendor_whose_device_is_called_cuda_is_told_by_its_markers(
    platform, monkeypatch, found, vendor
) -> None:
    platform("cuda", is_cuda=True)
    monkeypatch.setattr(features, "detect", lambda _: facts_of(found))
    assert (platform_device().vendor, platform_device().device_type) == (vendor, "cuda")


@pytest.mark.parametrize("answer", ["is_cuda_alike", "is_xpu"])
def test_gpus_bring_kernels(platform, answer) -> None:
    platform(**{answer: True})
    assert platform_has_kernels() is True


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True)])
def test_batch_invariance_is_what_vllm_was_asked_for(monkeypatch, value, on) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert batch_invariant() is on
