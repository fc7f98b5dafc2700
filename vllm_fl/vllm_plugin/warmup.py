# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled when they are first called, called before the first request.

Triton compiles a kernel anew for a size of one, for sizes that are multiples of 16 and for others,
and FlagGems takes other tiles for each power of two that a tensor's size comes near to. vLLM warms
up its own kernels, at few batch sizes; so the rest would be compiled while requests wait, which
vLLM's monitor calls "JIT compilation during inference". Where a backend that says so
(`Backend.compiles_at_first_call`) serves something, the worker lets vLLM's dummy run pass through
the model once for each class of sizes, before vLLM captures its graphs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..dispatch.binding import Binding
from ..dispatch.log import logger
from .functions.serve import records as functions
from .fusions.serve import records as modules
from .layers.serve import records as layers

__all__ = ["compiling", "fitting", "token_counts", "warm_up", "warming"]

_REQUESTS = (1, 16, 17)
"""Batches of the functions that no dummy run reaches: their kernels see rows, one by one."""


def warming(worker: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's `compile_or_warm_up_model` that warms up our kernels before vLLM's."""

    @functools.wraps(original)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        warm_up(worker)
        return original(*args, **kwargs)

    return compile_or_warm_up_model


def compiling() -> dict[str, tuple[str, ...]]:
    """Implementations in use that are compiled when first called, and the ops they serve."""
    found: dict[str, dict[str, None]] = {}
    bindings = [served.binding for record in layers for served in record.ops]
    bindings += [served.binding for record in modules for served in record.ops]
    bindings += [served.binding for record in functions for served in record.ops]
    for binding in bindings:
        for impl_id in () if binding is None else _compiled(binding):
            found.setdefault(impl_id, {})[str(binding.op)] = None  # type: ignore[union-attr]
    return {impl_id: tuple(sorted(ops)) for impl_id, ops in sorted(found.items())}


def _compiled(binding: Binding) -> tuple[str, ...]:
    """The implementation that calls get to first, if it is compiled when they do. What comes after
    it is for calls that its guard refuses, and a dummy run makes none of those."""
    first = binding.decision.candidates[:1]
    return tuple(i.impl_id for i in first if getattr(i.backend, "compiles_at_first_call", False))


def token_counts(largest: int, captured: tuple[int, ...] = ()) -> tuple[int, ...]:
    """One size of each class up to the largest batch, the largest first.

    A power of two and its two neighbours: between two powers of two they are one that is a
    multiple of 16 and one that is none, on either side of where a tensor's size (tokens times a
    constant) passes a power of two.

    Args:
        captured: the sizes for which vLLM captures graphs; all of them are run.
    """
    powers = (1 << exponent for exponent in range(largest.bit_length() + 1))
    near = (size for power in powers for size in (power - 1, power, power + 1))
    return tuple(sorted({n for n in (*near, *captured, largest) if 0 < n <= largest}, reverse=True))


def fitting(size: int, requests: int, longest: int) -> int:
    """A size of the same class that a dummy run can take, or 0.

    vLLM divides the tokens by its largest number of requests and gives the last one the rest, which
    may make it longer than the model allows: its attention then reads past the tables of blocks.
    """
    each, rest = divmod(size, min(size, requests))
    if each + rest <= longest:
        return size
    if each + 1 > longest:
        return 0
    even = size - rest
    return even if (size % 16 == 0) == (even % 16 == 0) else even + 1


def warm_up(worker: Any) -> None:
    """Run what is compiled at its first call. What fails is a warning: it fails again, or is only
    slow, when a request comes."""
    found = compiling()
    if not found:
        return
    said = "; ".join(f"{impl_id}: {', '.join(ops)}" for impl_id, ops in found.items())
    runner = worker.model_runner
    run = getattr(runner, "_dummy_run", None)
    if run is None:
        logger.warning(
            "%s has no dummy run, so kernels are compiled while the first requests wait (%s)",
            type(runner).__name__,
            said,
        )
        return
    from vllm.config import CUDAGraphMode

    config = worker.vllm_config
    scheduler = config.scheduler_config
    wanted = token_counts(
        scheduler.max_num_batched_tokens,
        tuple(config.compilation_config.cudagraph_capture_sizes or ()),
    )
    longest = config.model_config.max_model_len
    fitted = (fitting(size, scheduler.max_num_seqs, longest) for size in wanted)
    sizes = tuple(dict.fromkeys(size for size in fitted if size))
    start = time.perf_counter()
    size = 0
    try:
        for size in sizes:
            run(size, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
        for size in _REQUESTS:
            _call_functions(size, config.model_config, runner.device, found)
    except Exception as error:
        logger.warning(
            "warming up at size %d failed, so kernels may be compiled while requests wait (%s): %r",
            size,
            said,
            error,
        )
        return
    seconds = time.perf_counter() - start
    logger.info("warmed up at %d batch sizes in %.1f s (%s)", len(sizes), seconds, said)


def _call_functions(
    requests: int, model: Any, device: Any, found: Mapping[str, tuple[str, ...]]
) -> None:
    """Call the functions of the sampler that are served by what is compiled at its first call."""
    wanted = {op for ops in found.values() for op in ops}
    for record in functions:
        served = record.ops[0]
        make = _ARGUMENTS.get(served.op)
        if make is None or served.op not in wanted or served.binding is None:
            continue
        for arguments in make(requests, model.get_vocab_size(), device):
            served.binding.fn(*arguments)


def _penalties(requests: int, vocabulary: int, device: Any) -> Iterator[tuple[Any, ...]]:
    import torch

    logits = torch.zeros(requests, vocabulary, device=device)
    seen = torch.zeros(requests, vocabulary, dtype=torch.bool, device=device)
    yield logits, seen, seen.clone(), torch.ones(requests, device=device)


_ARGUMENTS: Mapping[str, Callable[[int, int, Any], Iterator[tuple[Any, ...]]]] = {
    "apply_repetition_penalties": _penalties,
}
"""Operators that no dummy run of a model reaches, and what they are called with."""
