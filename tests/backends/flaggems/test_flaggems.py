# SPDX-License-Identifier: Apache-2.0
"""When FlagGems is chosen, and when not; nothing of it is imported to know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from vllm_fl.backends.flaggems import flaggems, register_ops, versions
from vllm_fl.backends.flaggems.flaggems import GEMS_VENDORS, FlagGemsBackend, backend
from vllm_fl.backends.flaggems.impl import moe
from vllm_fl.backends.vendor import devices
from vllm_fl.dispatch import OpManager, SelectionPolicy
from vllm_fl.dispatch.config import Config
from vllm_fl.dispatch.types import BackendImplKind, DeviceFacts
from vllm_fl.ops import SIGNATURES

OPS = tuple(impl.op_name for impl in register_ops.backend.implementations)
INSTALLED = ("torch", "triton", "flag_gems", "sqlalchemy")
SOMEWHERE = DeviceFacts("cuda", "cuda", assumed=True, assumed_modules=INSTALLED)


def manager(device: DeviceFacts = SOMEWHERE, **policy: object) -> OpManager:
    return OpManager(config=Config(policy=SelectionPolicy(**policy)), device=device)


def losers(of: OpManager, op: str = "rms_norm") -> dict[str, tuple[str, str]]:
    return {loser.impl_id: (loser.code, loser.reason) for loser in of.decide(op).losers}


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if all were installed, beside a device of NVIDIA's."""
    monkeypatch.setattr(versions, "flaggems_version", lambda: Version("5.0.2"))
    monkeypatch.setattr(versions, "triton_version", lambda: Version("3.6.0"))
    monkeypatch.setattr(versions, "defines", lambda symbol: True)
    monkeypatch.setattr(FlagGemsBackend, "device_vendor", lambda self: "cuda")
    monkeypatch.setattr(devices, "detect", lambda vendor: DeviceFacts("cuda", "cuda"))
    return monkeypatch


def test_where_it_is_installed_it_wins_by_its_priority() -> None:
    decisions = {op: manager().decide(op) for op in OPS}
    assert {d.winner_id for d in decisions.values()} == {"default.flaggems"}
    assert {d.winner.priority for d in decisions.values() if d.winner} == {150}
    assert {impl.kind for impl in backend.implementations} == {BackendImplKind.DEFAULT}


def test_every_op_that_it_serves_is_declared_and_is_served_once() -> None:
    assert len(set(OPS)) == len(OPS)
    assert set(OPS) <= {signature.op_name for signature in SIGNATURES}


def test_on_a_cpu_the_device_is_the_reason() -> None:
    code, reason = losers(manager(DeviceFacts("cpu", "cpu")))["default.flaggems"]
    assert code == "device"
    assert reason.endswith("this device is cpu")


def test_every_vendor_of_flaggems_is_one_of_ours() -> None:
    table = {info.name: info.device_type for info in devices.VENDORS}
    assert {table[vendor] for vendor in GEMS_VENDORS} == set(backend.device_types or ())


def test_it_is_available_with_the_versions_and_the_device(fits: pytest.MonkeyPatch) -> None:
    assert backend.is_available() is True


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("flaggems_version", None, "no distribution flag-gems; pip install --no-deps flag-gems"),
        ("triton_version", Version("3.9.0"), "Triton 3.9.0 is installed, flag-gems 5.0.2 works on"),
    ],
)
def test_versions_that_do_not_fit_are_the_reason(
    fits: pytest.MonkeyPatch, attribute: str, value: Version | None, says: str
) -> None:
    fits.setattr(versions, attribute, lambda: value)
    assert str(backend.is_available()).startswith(says)


def test_a_machine_without_the_device_is_the_reason(fits: pytest.MonkeyPatch) -> None:
    fits.setattr(devices, "detect", lambda vendor: DeviceFacts("cpu", "cpu"))
    fits.setattr(torch.cuda, "device_count", lambda: 0)
    assert backend.is_available() == "no device of the vendor 'cuda' is here"


def test_a_device_without_a_marker_counts_where_pytorch_counts_it(
    fits: pytest.MonkeyPatch,
) -> None:
    fits.setattr(devices, "detect", lambda vendor: DeviceFacts("cpu", "cpu"))
    fits.setattr(torch.cuda, "device_count", lambda: 1)
    assert backend.is_available() is True


def test_a_vendor_that_flaggems_does_not_know_is_the_reason(fits: pytest.MonkeyPatch) -> None:
    fits.setattr(FlagGemsBackend, "device_vendor", lambda self: "thead")
    assert backend.is_available() == "flag_gems has no kernels for the vendor 'thead'"


def test_a_symbol_that_is_not_there_makes_its_op_alone_unavailable(
    fits: pytest.MonkeyPatch,
) -> None:
    fits.setattr(versions, "defines", lambda symbol: symbol != "rms_norm_forward")
    found = {impl.op_name: impl.availability() for impl in backend.implementations}
    if "requires" in {getattr(verdict, "code", "") for verdict in found.values()}:
        pytest.skip("flag_gems or sqlalchemy is not installed")
    refusals = {op: verdict for op, verdict in found.items() if not verdict}
    assert list(refusals) == ["rms_norm"]
    assert refusals["rms_norm"].reason == "no rms_norm_forward in flag_gems 5.0.2"


def test_the_probe_for_symbols_belongs_to_the_backend_that_loads_them(
    fits: pytest.MonkeyPatch,
) -> None:
    assert {impl.backend for impl in backend.implementations} == {backend}
    fits.setattr(versions, "defines", lambda symbol: False)
    [norm] = [i for i in backend.implementations if i.op_name == "rms_norm"]
    assert norm.available is not None
    assert norm.available() == "no rms_norm_forward in flag_gems 5.0.2"


def test_the_flagos_lists_govern_it() -> None:
    listed = manager(flagos_blacklist=frozenset({"rms_norm"}))
    assert losers(listed)["default.flaggems"] == (
        "flagos_list",
        "the flagos blacklist holds this op",
    )
    assert listed.decide("silu_and_mul").winner_id == "default.flaggems"
    only = manager(flagos_whitelist=frozenset({"rms_norm"}))
    assert only.decide("rms_norm").winner_id == "default.flaggems"
    assert losers(only, "silu_and_mul")["default.flaggems"] == (
        "flagos_list",
        "the flagos whitelist does not hold this op",
    )


WITHOUT_AN_IMPORT = """
import json, sys, torch
from vllm_fl.dispatch import OpManager, get_default_manager
from vllm_fl.dispatch.types import DeviceFacts
manager = get_default_manager()
manager.ensure_initialized()
impls = [i for ops in manager.registry.snapshot().impls_by_op.values() for i in ops]
available = [i.is_available() for i in impls]
explained = [str(manager.explain(op)) for op in manager.registry.list_operators()]
print(json.dumps({
    "flaggems": sum(i.impl_id == "default.flaggems" for i in impls),
    "imported": sorted({name.partition(".")[0] for name in sys.modules}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_registering_asking_and_explaining_import_nothing_and_touch_no_device() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AN_IMPORT],
        capture_output=True, text=True, timeout=120, env=environment, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["flaggems"] == len(OPS)
    assert {"flag_gems", "flaggems_vllm", "triton", "vllm"} & set(found["imported"]) == set()
    assert not found["cuda"]


def test_the_module_says_which_names_it_exports() -> None:
    assert set(flaggems.__all__) == {"GEMS_VENDORS", "FlagGemsBackend", "backend"}


def test_a_kernel_with_sizes_among_its_constants_is_compiled_for_few(monkeypatch) -> None:
    """moe_align_block_size: once for each power of two of the room, and not for each batch."""
    seen = set()

    def kernel(ids, experts, block_size, sorted_ids, expert_ids, used) -> None:
        seen.add((sorted_ids.numel(), expert_ids.numel()))

    monkeypatch.setattr(moe, "kernels", SimpleNamespace(moe_align_block_size_triton=kernel))
    for tokens in range(1, 1001):
        ids = torch.zeros(tokens, 8, dtype=torch.int32)
        sorted_ids, expert_ids, _ = moe.moe_align_block_size(ids, 64, 128)
        assert sorted_ids.numel() >= 8 * tokens and expert_ids.numel() * 64 >= sorted_ids.numel()
    assert seen == {(1 << 14, 1 << 8)}  # from 8 + 129 * 64 entries to 8000 + 129 * 64
