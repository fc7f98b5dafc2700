# SPDX-License-Identifier: Apache-2.0
"""The worker calls what is compiled at its first call, and nothing else, before requests come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl.backends import Backend
from vllm_fl.backends.flaggems.flaggems import FlagGemsBackend
from vllm_fl.backends.vendor.cuda.cuda import CudaBackend
from vllm_fl.vllm_plugin import warmup
from vllm_fl.vllm_plugin.warmup import fitting, token_counts, warm_up


class Triton(Backend):
    impl_id = "vendor.triton"
    compiles_at_first_call = True

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : x.shape[-1] // 2].clone()


class Compiled(Triton):
    impl_id = "vendor.compiled"
    compiles_at_first_call = False


class Runner:
    """vLLM's model runner, as far as it is asked."""

    device = torch.device("cpu")

    def __init__(self, error: Exception | None = None) -> None:
        self.runs: list[tuple[int, dict[str, Any]]] = []
        self.error = error

    def _dummy_run(self, num_tokens: int, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.runs.append((num_tokens, options))


def worker_of(runner: Any, *, tokens: int = 32, captured: Any = None) -> Any:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=256),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
        model_config=SimpleNamespace(get_vocab_size=lambda: 40, max_model_len=2048),
    )
    return SimpleNamespace(model_runner=runner, vllm_config=config)


@pytest.fixture
def served(register, build, register_impl):
    """served(Triton) builds a layer that the backend serves."""

    def served(backend: type[Backend]) -> Any:
        from vllm.model_executor.layers.activation import SiluAndMul

        register()
        register_impl("silu_and_mul", backend().silu_and_mul)
        return build(SiluAndMul)

    return served


def test_what_is_compiled_at_its_first_call_is_run_once_for_each_class_of_sizes(
    served, log
) -> None:
    from vllm.config import CUDAGraphMode

    layer = served(Triton)
    runner = Runner()
    warm_up(worker_of(runner, captured=[1, 8, 24]))
    sizes = [size for size, _ in runner.runs]
    assert sizes == [32, 31, 24, 17, 16, 15, 9, 8, 7, 5, 4, 3, 2, 1]
    options = {"cudagraph_runtime_mode": CUDAGraphMode.NONE, "skip_eplb": True}
    assert all(given == options for _, given in runner.runs)
    del layer


def test_kernels_that_are_compiled_already_cost_nothing(served) -> None:
    layer = served(Compiled)
    runner = Runner()
    warm_up(worker_of(runner))
    assert runner.runs == []
    del layer


def test_every_size_is_of_a_kind_that_was_run() -> None:
    """For sizes of one, of multiples of 16 and of others, and for each power of two of the
    size of a tensor of any width."""
    sizes = token_counts(2048)
    assert len(sizes) < 40
    for width in (1, 3, 64, 1000, 3072, 11008):

        def kind(n: int, width: int = width) -> tuple[bool, bool, int]:
            return n == 1, n % 16 == 0, (n * width - 1).bit_length()

        assert {kind(n) for n in range(1, 2049)} <= {kind(n) for n in sizes}, width


def test_a_runner_without_a_dummy_run_is_left_alone_with_a_warning(served, log) -> None:
    layer = served(Triton)
    warm_up(worker_of(SimpleNamespace()))
    assert log[-1] == (
        "WARNING SimpleNamespace has no dummy run, so kernels are compiled while the first "
        "requests wait (vendor.cpu.test: silu_and_mul)"
    )
    del layer


def test_a_dummy_run_that_fails_stops_no_worker(served, log) -> None:
    layer = served(Triton)
    warm_up(worker_of(Runner(RuntimeError("no memory"))))
    assert log[-1] == (
        "WARNING warming up at size 32 failed, so kernels may be compiled while requests wait "
        "(vendor.cpu.test: silu_and_mul): RuntimeError('no memory')"
    )
    del layer


def test_the_workers_own_warm_up_follows_with_its_arguments_and_result(monkeypatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(warmup, "warm_up", lambda worker: order.append(worker))
    warmed = warmup.warming("the worker", lambda *args, **more: order.append((args, more)) or 7)
    assert warmed(1, two=2) == 7
    assert order == ["the worker", ((1,), {"two": 2})]


def test_a_function_of_the_sampler_that_no_dummy_run_reaches_is_called_too(monkeypatch) -> None:
    calls: list[Any] = []
    binding = SimpleNamespace(fn=lambda *args: calls.append([list(a.shape) for a in args]))
    served = SimpleNamespace(op="apply_repetition_penalties", binding=binding)
    record = SimpleNamespace(ops=(served,))
    monkeypatch.setattr(warmup, "functions", [record])
    monkeypatch.setattr(
        warmup, "compiling", lambda: {"default.flaggems": ("apply_repetition_penalties",)}
    )
    warm_up(worker_of(Runner()))
    assert calls == [[[n, 40], [n, 40], [n, 40], [n]] for n in (1, 16, 17)]


def test_flaggems_says_that_it_compiles_and_vllms_kernels_do_not() -> None:
    assert FlagGemsBackend.compiles_at_first_call is True
    assert CudaBackend.compiles_at_first_call is False


def test_what_serves_only_the_calls_that_a_guard_refuses_is_not_warmed_up(monkeypatch) -> None:
    def impl(impl_id: str, compiles: bool) -> SimpleNamespace:
        return SimpleNamespace(
            impl_id=impl_id, backend=SimpleNamespace(compiles_at_first_call=compiles)
        )

    def served_by(*candidates: SimpleNamespace) -> list[SimpleNamespace]:
        decision = SimpleNamespace(candidates=candidates)
        binding = SimpleNamespace(op="rms_norm", decision=decision)
        return [SimpleNamespace(ops=(SimpleNamespace(binding=binding),))]

    slow, fast = impl("default.slow", True), impl("vendor.fast", False)
    monkeypatch.setattr(warmup, "layers", served_by(fast, slow))
    assert warmup.compiling() == {}
    monkeypatch.setattr(warmup, "layers", served_by(slow, fast))
    assert warmup.compiling() == {"default.slow": ("rms_norm",)}


@pytest.mark.parametrize(("requests", "longest"), [(1024, 512), (256, 40), (64, 4096), (3, 17)])
def test_no_request_of_a_dummy_run_is_longer_than_the_model_allows(requests, longest) -> None:
    for size in token_counts(16384):
        fitted = fitting(size, requests, longest)
        if not fitted:
            assert size // min(size, requests) >= longest
            continue
        each, rest = divmod(fitted, min(fitted, requests))
        assert each + rest <= longest
        assert (fitted % 16 == 0) == (size % 16 == 0)
    assert fitting(16383, 1024, 512) == 15361
    assert fitting(8193, 1024, 512) == 8193
