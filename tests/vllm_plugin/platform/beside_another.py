# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: vLLM chooses its platform on a machine that looks like an Ascend's,
where another package offers a platform too. Prints the choice, or what vLLM raises."""

from __future__ import annotations

from vllm_fl.backends.vendor import devices

_facts = devices.facts_of("ascend")
devices.detect = lambda vendor, *args, **kwargs: (
    _facts if vendor is None else devices.facts_of(vendor)
)

try:
    from vllm.platforms import current_platform

    print(f"chosen {type(current_platform).__module__}.{type(current_platform).__qualname__}")
except Exception as error:
    print(f"raised {type(error).__name__}: {error}")
