# SPDX-License-Identifier: Apache-2.0
"""What native kernels this installation has, and whether they load, for `vllm-fl doctor`."""

from __future__ import annotations

from typing import Any

from ..native import MODULES, DeviceBuild, find_refusal, how_to_build, native_build
from .child import ask

__all__ = ["native_kernels"]


def native_kernels() -> dict[str, Any]:
    """What was built, tried in a child process each.

    Returns:
        asked (VLLM_FL_DEVICE of the build), torch (that it was for), problem (why nothing is known
        of it), devices: for each its name, state (a sentence), code ("works", "missing", "unfit" or
        "broken"), advice, compiler, architectures.
    """
    build = native_build()
    return {
        "asked": build.asked,
        "torch": build.torch,
        "problem": build.problem,
        "devices": [_device(name, build.devices.get(name, DeviceBuild())) for name in MODULES],
    }


def _device(name: str, made: DeviceBuild) -> dict[str, Any]:
    refusal = find_refusal(name)
    if refusal is not None:
        code, state, advice = refusal.code, refusal.why, refusal.advice
    else:
        code, state, advice = _load(name)
    return {
        "device": name,
        "state": state,
        "code": code,
        "advice": advice,
        "compiler": made.compiler,
        "architectures": list(made.architectures),
    }


def _load(device: str) -> tuple[str, str, str]:
    """Code, state and advice of kernels that nothing is known to be wrong with."""
    reply = ask("kernels", {"device": device}, quiet=True)
    if reply.answer is None:
        why = reply.ended if reply.error is None else reply.error["text"]
        return "broken", f"{MODULES[device]} cannot be loaded: {why}", how_to_build(device)
    if reply.answer["refusal"] is not None:
        refusal = reply.answer["refusal"]
        return refusal["code"], refusal["why"], refusal["advice"]
    return "works", f"works, {reply.answer['uses']}", ""
