# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.cli import samples
from tests.dispatch.helpers import make_impl, make_manager
from vllm_fl.cli.diagnosis import diagnose
from vllm_fl.cli.inventory import inventory
from vllm_fl.dispatch import discovery

FITTING = [e for e in samples.VERSIONS if e["package"] != "flag-gems"]


@pytest.fixture(autouse=True)
def _nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "BUILTIN_MODULES", ())


def diagnosis(**seen: Any) -> dict[str, Any]:
    return diagnose(
        seen.get("versions", FITTING),
        seen.get("imports", samples.IMPORTS),
        seen.get("found") or samples.found(),
        seen.get("hooks", samples.HOOKS),
        seen.get("native", samples.NATIVE),
    )


def findings(**seen: Any) -> list[tuple[str, str, str]]:
    return [(f["level"], f["about"], f["text"]) for f in diagnosis(**seen)["findings"]]


def of(*impl_ids: str, **options: Any) -> dict[str, Any]:
    """What is found of a manager with these implementations of `scale`."""
    manager = make_manager(*map(make_impl, impl_ids), **options)
    return {**inventory(manager), "config_error": None}


def test_where_nothing_is_wrong_the_verdict_is_fine() -> None:
    assert findings() == []
    assert diagnosis()["verdict"] == {
        "problems": 0,
        "notes": 0,
        "text": "Verdict: fine, no problem found.",
    }


def test_problems_and_notes_are_counted() -> None:
    data = diagnosis(versions=samples.VERSIONS, found=of("reference.torch"))
    assert data["verdict"] == {"problems": 1, "notes": 1, "text": "Verdict: 1 problem, 1 note."}


def test_versions_that_do_not_fit_are_a_problem_with_advice() -> None:
    (finding,) = diagnosis(versions=samples.VERSIONS)["findings"]
    assert finding["text"].startswith("flag-gems 5.0.2 with triton 3.9.0: ")
    assert finding["about"] == "broken pairing"
    assert finding["advice"].startswith("install the Triton of your torch, from 3.3 to 3.8")


@pytest.mark.parametrize("package", ["torch", "vllm"])
def test_what_is_not_installed_is_a_problem(package: str) -> None:
    versions = [{**e, "version": None} if e["package"] == package else e for e in FITTING]
    found = findings(versions=versions)
    assert [text for *_, text in found if text.startswith(f"{package} is not installed: ")]


def test_an_import_that_fails_is_a_problem_and_in_the_table() -> None:
    data = diagnosis(imports={"torch": None, "numpy": "RuntimeError: broken"})
    assert [f["text"] for f in data["findings"]] == [
        "numpy cannot be imported: RuntimeError: broken"
    ]
    shown = {entry["package"]: entry["import_error"] for entry in data["versions"]}
    assert (shown["torch"], shown["numpy"], shown["triton"]) == ("", "RuntimeError: broken", None)


def with_failed_plugin(source: str) -> dict[str, Any]:
    found = copy.deepcopy(samples.found())
    found["plugins"][1] |= {"error": "ImportError: no libacme", "source": source}
    return found


def test_a_failed_plugin_is_a_problem_with_its_package() -> None:
    (finding,) = diagnosis(found=with_failed_plugin("entry_point"))["findings"]
    assert finding == {
        "level": "problem",
        "about": "plugins",
        "text": "acme failed: ImportError: no libacme",
        "advice": "mend or uninstall vllm-plugin-acme",
    }


def test_what_ships_fails_with_torch() -> None:
    found = with_failed_plugin("builtin")
    advice = [f["advice"] for f in diagnosis(found=found, imports={"torch": "no"})["findings"]]
    assert advice[-1] == "mend torch first"
    assert diagnosis(found=found)["findings"][0]["advice"] == "see what its import needs"


def test_a_wrong_configuration_is_a_problem_and_being_switched_off_a_note() -> None:
    found = {**samples.found(), "config_error": "VLLM_FL_PREFER: no", "enabled": False}
    assert [(level, about) for level, about, _ in findings(found=found)] == [
        ("note", "configuration"),
        ("problem", "configuration"),
    ]


def test_an_op_that_nobody_declared_is_a_problem_with_the_name_that_was_meant() -> None:
    found = of("vendor.a")
    manager = make_manager(make_impl("vendor.a"), make_impl("vendor.a", op_name="scael"))
    found = {**inventory(manager), "config_error": None}
    assert findings(found=found) == [
        (
            "problem",
            "operators",
            'nobody declared scael, so its implementations are unchecked; did you mean "scale"?',
        )
    ]


def test_an_op_that_nothing_can_serve_is_a_problem_and_one_that_nobody_implements_a_note() -> None:
    found = of("vendor.a", deny_vendors=frozenset({"a"}))
    assert findings(found=found) == [
        ("problem", "operators", "nothing can serve scale: every implementation was rejected")
    ]
    assert findings(found=of()) == [
        ("note", "operators", "nothing can serve scale: no implementation is registered")
    ]


def test_what_the_reference_serves_is_a_note() -> None:
    assert findings(found=of("reference.torch")) == [
        ("note", "operators", "the reference serves scale: correct, and slow")
    ]


def test_a_tie_that_only_the_name_settles_is_a_problem_and_other_ties_are_notes() -> None:
    data = diagnosis(found=of("vendor.a", "vendor.b"))
    (finding,) = data["findings"]
    assert (finding["level"], finding["text"], finding["advice"]) == (
        "problem",
        "scale: vendor.a and vendor.b have priority 100; settled by: the smaller id",
        "say which: VLLM_FL_PER_OP='scale=impl:vendor.a'",
    )
    assert [level for level, *_ in findings(found=of("vendor.a", "vendor.cpu"))] == ["note"]


def test_a_vendor_that_always_loses_to_flaggems_is_told_the_remedies_and_the_proof() -> None:
    data = diagnosis(found=of("default.flaggems", "vendor.acme"))
    [finding] = [f for f in data["findings"] if f["about"] == "priority"]
    assert (finding["level"], finding["text"]) == (
        "note",
        "vendor.acme could serve scale, and always loses to default.flaggems, whose priority is "
        "150, not 100",
    )
    assert finding["advice"] == (
        "where the vendor's kernels are faster, its package says so: with an order in a policy "
        "file (registry.add_policies), or with a priority above that. That they are right "
        "and faster is shown on the device: vllm-fl verify --impl vendor.acme, vllm-fl bench scale"
    )


def test_what_is_never_selected_is_one_line_for_all_its_ops() -> None:
    shown = {(e["impl_id"], *e["ops"]): e["reason"] for e in diagnosis()["never_selected"]}
    assert shown == {
        ("vendor.acme", "rms_norm", "silu_and_mul"): "runs on acme, this device is cpu",
        ("reference.torch", "silu_and_mul"): "vendor.cpu takes every call",
    }


def test_hooks_that_cannot_be_set_are_a_problem() -> None:
    hooks = {"error": "the process ended with exit code 3"}
    assert findings(hooks=hooks) == [
        (
            "problem",
            "hooks",
            "registering the plugin as vLLM does: the process ended with exit code 3",
        )
    ]


def test_a_hook_that_somebody_replaced_and_a_platform_that_is_another_are_notes() -> None:
    hooks = copy.deepcopy(samples.HOOKS)
    hooks["installed"][0]["in_place"] = False
    hooks["device"] = "cuda:sm_90"
    assert [(level, about) for level, about, _ in findings(hooks=hooks)] == [
        ("note", "hooks"),
        ("note", "device"),
    ]


def test_a_chip_of_which_only_a_part_is_here_is_a_note() -> None:
    sightings = [
        {"vendor": "cuda", "found": True, "text": "cuda: found by /dev/nvidia0"},
        {"vendor": "ascend", "found": False, "text": "ascend: not found; /dev/davinci0 is here"},
    ]
    assert findings(found=samples.found() | {"sightings": sightings}) == [
        ("note", "device", "ascend: not found; /dev/davinci0 is here")
    ]


def with_kernels(cpu: tuple[str, str], cuda: tuple[str, str]) -> dict[str, Any]:
    """What was found of native kernels: (code, state) of each device."""
    devices = [
        {"device": name, "code": code, "state": state, "advice": f"build {name}"}
        for name, (code, state) in (("cpu", cpu), ("cuda", cuda))
    ]
    return {**samples.NATIVE, "devices": devices}


def test_native_kernels_that_were_not_built_are_a_note_where_they_would_run() -> None:
    native = with_kernels(("missing", "no CPU kernels"), ("missing", "no CUDA kernels"))
    (finding,) = diagnosis(native=native)["findings"]
    assert finding == {
        "level": "note",
        "about": "native kernels",
        "text": "no CPU kernels",
        "advice": "build cpu",
    }
    found = samples.found()
    found["device"]["vendor"] = "cuda"
    texts = [text for _, about, text in findings(native=native, found=found)]
    assert "no CUDA kernels" in texts and "no CPU kernels" not in texts


@pytest.mark.parametrize("code", ["unfit", "broken"])
def test_native_kernels_that_are_there_and_cannot_be_used_are_a_problem(code: str) -> None:
    native = with_kernels(("works", "works"), (code, "for another torch"))
    assert findings(native=native) == [("problem", "native kernels", "for another torch")]


def test_native_kernels_that_cannot_be_loaded_without_torch_are_torchs_problem() -> None:
    native = with_kernels(("broken", "no torch"), ("missing", "no CUDA kernels"))
    imports = {**samples.IMPORTS, "torch": "ImportError: no"}
    assert [about for _, about, _ in findings(native=native, imports=imports)] == ["versions"]


def test_without_a_registry_the_rest_is_told() -> None:
    data = diagnosis(found={"error": "the process that was asked was killed by SIGSEGV"})
    assert [f["about"] for f in data["findings"]] == ["registry"]
    assert (data["plugins"], data["ops"], data["never_selected"]) == ([], [], [])


def test_a_torch_that_an_extension_without_its_driver_takes_down_is_told_how_to_work() -> None:
    error = (
        "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension "
        "auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )
    data = diagnosis(imports={**samples.IMPORTS, "torch": error})
    [finding] = [f for f in data["findings"] if f["text"].startswith("torch cannot be imported")]
    assert finding["advice"] == (
        "torch_npu is installed, and what it needs is not found: CANN (source its set_env.sh). To "
        "use torch without it, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall torch_npu"
    )
