# SPDX-License-Identifier: Apache-2.0
"""Policies that packages bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_fl.dispatch import OpManager, OpRegistry, RegistrationError, discovery
from vllm_fl.dispatch.config import load_config
from vllm_fl.dispatch.packaged import policy_files
from vllm_fl.dispatch.types import DeviceFacts, Origin

from .helpers import SCALE, make_impl

ACME = DeviceFacts("acme", "acme")
PACKAGE = Origin("entry_point", "acme", "vllm-plugin-acme", "1.2.0")
OTHER = Origin("module", "vllm_fl_other")
ORDER = "op_backends:\n  scale: [vendor:acme, flagos]\n"


@pytest.fixture
def registry() -> OpRegistry:
    registry = OpRegistry()
    registry.plugins = ()
    registry.declare(SCALE)
    registry.register_many(
        [make_impl("default.flaggems", priority=150), make_impl("vendor.acme", priority=100)]
    )
    return registry


def folder_of(tmp_path: Path, text: str = ORDER, name: str = "acme.yaml") -> Path:
    folder = tmp_path / "policies"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def bring(registry: OpRegistry, folder: Path, origin: Origin = PACKAGE) -> None:
    with registry.batch(origin):
        registry.add_policies(folder)


def decide(registry: OpRegistry, device: DeviceFacts = ACME):
    return OpManager(registry, device=device).decide("scale")


def test_on_its_device_a_package_s_order_outranks_priority_and_is_named(registry, tmp_path) -> None:
    assert decide(registry).winner_id == "default.flaggems"
    bring(registry, folder_of(tmp_path))
    decision = decide(registry)
    assert decision.winner_id == "vendor.acme"
    assert decision.reason == (
        "the order for scale names it (from policy of vllm-plugin-acme 1.2.0, acme.yaml:2)"
    )


def test_on_another_vendor_s_device_it_says_nothing(registry, tmp_path) -> None:
    bring(registry, folder_of(tmp_path))
    assert decide(registry, DeviceFacts("cpu", "cpu")).winner_id == "default.flaggems"


def test_the_file_of_the_product_goes_before_the_vendor_s(registry, tmp_path) -> None:
    bring(registry, folder_of(tmp_path))
    folder_of(tmp_path, "op_backends:\n  scale: [flagos]\n", "acme_x2.yaml")
    device = DeviceFacts("acme", "acme", "Acme X2")
    assert decide(registry, device).winner_id == "default.flaggems"
    assert decide(registry).winner_id == "vendor.acme"


def test_it_outranks_what_vllm_fl_ships_and_nothing_that_the_user_says(tmp_path) -> None:
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text("op_backends:\n  scale: [flagos]\n  norm: [flagos]\n")
    packaged = [(folder_of(tmp_path) / "acme.yaml", "policy of acme")]
    config = load_config({}, shipped=shipped, packaged=packaged)
    assert config.policy.order_for("scale") == ("vendor:acme", "flagos")
    assert config.policy.order_for("norm") == ("flagos",)
    said = {"VLLM_FL_PER_OP": "scale=reference"}
    config = load_config(said, shipped=shipped, packaged=packaged)
    assert config.policy.order_for("scale") == ("reference",)
    config = load_config({"VLLM_FL_PREFER": "flagos"}, packaged=packaged)
    assert config.policy.order_for("scale") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "op_backends: {scale: [vendor:acme]}\ndeny_vendors: [other]\n",
            "policy of vllm-plugin-acme 1.2.0, acme.yaml:2: a package orders implementations "
            "(op_backends) and nothing else; found deny_vendors",
        ),
        ("op_backends:\n  scael: [flagos]\n", 'acme.yaml:2: unknown op "scael"; valid: scale. Did'),
        ("op_backends:\n  scale: [vendor:acne]\n", 'unknown vendor "acne"; valid: acme. Did'),
        ("op_backends:\n  scale: [fast]\n", "acme.yaml:2: op_backends.scale: unknown order token"),
        ("op_backends: [", "acme.yaml:1: not valid YAML"),
    ],
)
def test_a_wrong_policy_is_its_package_s_failure(registry, tmp_path, text, said) -> None:
    with pytest.raises(RegistrationError) as caught:
        bring(registry, folder_of(tmp_path, text))
    assert said in str(caught.value)
    assert registry.snapshot().policies == ()


def test_a_folder_without_policies_is_refused_with_what_to_do(registry, tmp_path) -> None:
    with pytest.raises(RegistrationError, match=r"holds no \*\.yaml; name each .*package-data"):
        bring(registry, tmp_path)


def test_two_packages_that_order_one_op_are_told_apart_by_name(registry, tmp_path) -> None:
    bring(registry, folder_of(tmp_path))
    (tmp_path / "second").mkdir()
    with pytest.raises(RegistrationError) as caught:
        bring(registry, folder_of(tmp_path / "second"), OTHER)
    assert str(caught.value) == (
        "policy of vllm_fl_other, acme.yaml: scale is ordered by the policy of vllm-plugin-acme "
        "1.2.0 too; uninstall one of them"
    )


def test_what_a_failed_plugin_brought_is_taken_back(registry, tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), registry.batch(PACKAGE):
        registry.add_policies(folder_of(tmp_path))
        raise ZeroDivisionError
    assert registry.snapshot().policies == ()


def test_it_goes_and_comes_with_discovery(registry, tmp_path) -> None:
    bring(registry, folder_of(tmp_path))
    by_hand = tmp_path / "hand"
    by_hand.mkdir()
    registry.add_policies(folder_of(by_hand, "op_backends: {}\n", "other.yaml"))
    registry.drop_discovered()
    assert [p.folder.parent.name for p in registry.snapshot().policies] == ["hand"]
    registry.clear()
    assert registry.snapshot().policies == ()


def test_a_plugin_brings_its_policy_in_every_process(plugin_path, monkeypatch) -> None:
    package = plugin_path / "vllm_fl_acme"
    folder_of(plugin_path)
    package.mkdir()
    (plugin_path / "policies").rename(package / "policies")
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "from vllm_fl.dispatch import BackendImplKind, OpImpl, OpSignature\n"
        "def register_builtins(registry):\n"
        "    registry.declare(OpSignature.parse('scale(x, factor=2)'))\n"
        "    registry.register_impl(OpImpl('scale', 'vendor.acme', BackendImplKind.VENDOR,\n"
        "                                  lambda x, factor=2: x, 'acme', 100))\n"
        "    registry.add_policies(Path(__file__).with_name('policies'))\n"
    )
    monkeypatch.setattr(discovery, "BUILTIN_MODULES", ())
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "vllm_fl_acme")
    manager = OpManager(device=ACME)
    assert manager.policy_in_force.order_for("scale") == ("vendor:acme", "flagos")
    assert manager.config.sources["per_op_order.scale"] == "policy of vllm_fl_acme, acme.yaml:2"
    files = policy_files(ACME, manager.registry.snapshot())
    assert files["shipped"] is None
    assert [path.name for path, _ in files["packaged"]] == ["acme.yaml"]


def test_what_is_brought_after_the_first_decision_counts_from_the_next_on(
    registry, tmp_path
) -> None:
    manager = OpManager(registry, device=ACME)
    assert manager.decide("scale").winner_id == "default.flaggems"
    assert manager.resolve("scale") is not None
    bring(registry, folder_of(tmp_path))
    assert manager.resolve_candidates("scale")[0].impl_id == "vendor.acme"
    assert manager.decide("scale").winner_id == "vendor.acme"


def test_a_loaded_model_keeps_its_order_until_thaw(registry, tmp_path) -> None:
    manager = OpManager(registry, device=ACME)
    manager.freeze()
    bring(registry, folder_of(tmp_path))
    assert manager.decide("scale").winner_id == "default.flaggems"
    manager.thaw()
    assert manager.decide("scale").winner_id == "vendor.acme"


def test_a_folder_is_found_from_any_working_directory(registry, tmp_path, monkeypatch) -> None:
    folder = folder_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    bring(registry, Path(folder.name))
    monkeypatch.chdir("/")
    assert decide(registry).winner_id == "vendor.acme"
