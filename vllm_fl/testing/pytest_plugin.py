# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: `pytest --vllm-fl-vendor NAME` tests a vendor's implementations.

pytest imports this in every run, so that it imports neither torch nor the rest of the kit before
the option is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .vendor import VendorCase, VendorSuite

__all__: list[str] = []

FIXTURE = "vllm_fl_case"
OPTION = "--vllm-fl-vendor"

_suite: pytest.StashKey[VendorSuite] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("vllm_fl", "conformance of a vendor's implementations (vllm_fl)")
    group.addoption(OPTION, metavar="NAME", default=None, help="test this vendor's implementations")
    group.addoption(
        "--vllm-fl-device",
        metavar="DEVICE",
        default=None,
        help="where the tensors are, as torch names it (default: the vendor's device)",
    )
    group.addoption(
        "--vllm-fl-xfail",
        metavar="FILE",
        action="append",
        default=[],
        type=Path,
        help="tests that are known to fail, each line a name and # a reason",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Find the cases first, so that a wrong name or line ends the run with one sentence."""
    if session.config.getoption(OPTION) is not None:
        _suite_of(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case."""
    if FIXTURE not in metafunc.fixturenames:
        return
    if metafunc.config.getoption(OPTION) is None:
        skip = pytest.mark.skip(reason=f"give {OPTION} NAME")
        metafunc.parametrize(FIXTURE, [pytest.param(None, id="no vendor", marks=skip)])
        return
    suite = _suite_of(metafunc.config)
    metafunc.parametrize(FIXTURE, suite.parameters(), indirect=True)


@pytest.fixture
def vllm_fl_case(request: pytest.FixtureRequest) -> VendorCase:
    """One conformance case of the vendor that --vllm-fl-vendor names: `vllm_fl_case.check()`."""
    case: VendorCase = request.param
    return case


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests where no test file has asked for them."""
    if config.getoption(OPTION) is None:
        return
    if any(FIXTURE in getattr(item, "fixturenames", ()) for item in items):
        return
    path = Path(__file__).with_name("conformance.py")
    module: Any = pytest.Module.from_parent(session, path=path)
    items.extend(session.genitems(module))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child processes."""
    suite = config.stash.get(_suite, None)
    if suite is not None:
        suite.close()


def _suite_of(config: pytest.Config) -> VendorSuite:
    suite = config.stash.get(_suite, None)
    if suite is None:
        from ..dispatch.errors import DispatchError
        from .vendor import VendorSuite
        from .xfail import XfailError

        try:
            suite = VendorSuite(
                config.getoption(OPTION),
                config.getoption("--vllm-fl-device"),
                config.getoption("--vllm-fl-xfail"),
            )
        except (DispatchError, XfailError) as error:
            raise pytest.UsageError(str(error)) from error
        config.stash[_suite] = suite
    return suite
