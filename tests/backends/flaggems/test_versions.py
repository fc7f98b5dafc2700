# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest
from packaging.version import Version

from vllm_fl.backends.flaggems import versions

WORKS = Version("5.0.2"), Version("3.6.0")


@pytest.mark.parametrize("triton", ["3.3.0", "3.6.0", "3.7.1", "3.8.0+git1"])
def test_the_proven_flaggems_works_on_these_tritons(triton: str) -> None:
    assert versions.reason(WORKS[0], Version(triton)) is None


@pytest.mark.parametrize(
    ("flaggems", "triton", "says"),
    [
        (None, "3.6.0", "no distribution flag-gems; pip install --no-deps flag-gems sqlalchemy"),
        ("4.2.1", "3.6.0", "flag-gems 4.2.1 is installed, >=5.0.2,<5.1 is proven"),
        ("5.1.0rc1", "3.6.0", "flag-gems 5.1.0rc1 is installed, >=5.0.2,<5.1 is proven"),
        ("5.0.2", None, "no distribution of Triton"),
        ("5.0.2", "3.2.0", "Triton 3.2.0 is installed, flag-gems 5.0.2 works on >=3.3,<3.9"),
        ("5.0.2", "3.9.0", "Triton 3.9.0 is installed, flag-gems 5.0.2 works on >=3.3,<3.9"),
    ],
)
def test_a_pair_that_does_not_fit_says_what_is_installed_and_what_fits(
    flaggems: str | None, triton: str | None, says: str
) -> None:
    found = (None if v is None else Version(v) for v in (flaggems, triton))
    assert versions.reason(*found) == says


@pytest.mark.parametrize(("triton", "needed"), [("3.6.9", False), ("3.7.0", True), ("3.8.1", True)])
def test_the_shim_is_for_triton_3_7_and_later(triton: str, needed: bool) -> None:
    assert versions.needs_shim(Version(triton)) is needed


def test_a_distribution_that_stands_in_for_triton_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "triton-ascend":
            raise PackageNotFoundError(name)
        return "3.4.0"

    monkeypatch.setattr(versions, "version", version)
    assert versions.triton_version() == Version("3.4.0")
    assert versions.flaggems_version() is None


def test_a_symbol_is_found_in_the_source_of_either_package_without_an_import(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, file, text in (
        ("flag_gems", "fused/__init__.py", "from .a import silu_and_mul_out\n"),
        ("flaggems_vllm", "__init__.py", "__all__ = ['grouped_topk']\nraise SystemExit\n"),
    ):
        path = tmp_path / package / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "flag_gems" / "__init__.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flag_gems", raising=False)
    versions._exported.cache_clear()
    found = [versions.defines(n) for n in ("silu_and_mul_out", "grouped_topk", "silu_and_mul")]
    versions._exported.cache_clear()
    assert found == [True, True, False]
