# SPDX-License-Identifier: Apache-2.0
"""vendor.cuda on a machine without a GPU: what is registered, and what its guards say."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vllm_fl.backends.vendor.cuda import cuda, register_ops
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.ops import CONTRACTS, SIGNATURES

IMPLS = {impl.op_name: impl for impl in cuda.backend.implementations}
DECLARED = {signature.op_name: signature for signature in SIGNATURES}


def on_cuda(value: object, mode: FakeTensorMode) -> object:
    """The metadata of a tensor on a GPU that is not here."""
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cuda:0"))


def guard_of(op: str, *args: object) -> object:
    """The guard's answer, on metadata alone."""
    supports = IMPLS[op].supports
    assert supports is not None
    mode = FakeTensorMode()
    with mode:
        return supports(*(on_cuda(a, mode) for a in args))


def test_it_registers_under_the_declared_signatures() -> None:
    registry = OpRegistry()
    for signature in SIGNATURES:
        registry.declare(signature)
    register_ops.register_builtins(registry)
    for op in IMPLS:
        assert "vendor.cuda" in {impl.impl_id for impl in registry.get_implementations(op)}
    assert set(IMPLS) <= set(DECLARED)


def test_what_it_writes_is_what_the_contract_lets_it_write() -> None:
    for op, impl in IMPLS.items():
        assert set(impl.mutates) <= set(DECLARED[op].inplace), op


def test_on_a_cpu_it_is_unavailable_for_the_device() -> None:
    decision = OpManager().explain("rms_norm")
    reasons = {loser.impl_id: loser.reason for loser in decision.losers}
    assert "cuda" in reasons["vendor.cuda"]


@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_guard_refuses_tensors_on_the_cpu_and_says_where_they_are(op) -> None:
    contract = next(c for c in CONTRACTS if c.name == op)
    dtype = next(iter(contract.tolerances))
    args = contract.cases_for(dtype)[0].make(dtype, torch.Generator().manual_seed(0))
    assert "cpu" in str(IMPLS[op].supports(*args))


@pytest.mark.parametrize("op", sorted(IMPLS))
def test_every_guard_takes_a_plain_case_and_reads_no_data(op) -> None:
    contract = next(c for c in CONTRACTS if c.name == op)
    dtype = torch.bfloat16 if torch.bfloat16 in contract.tolerances else torch.float32
    verdicts = {
        case.name: guard_of(op, *case.make(dtype, torch.Generator().manual_seed(0)))
        for case in contract.cases_for(dtype)
        if case.name.startswith(("one token", "no key"))
    }
    assert any(verdict is True for verdict in verdicts.values()), verdicts


def _norm(shape: tuple[int, ...]) -> tuple[object, ...]:
    x = torch.zeros(shape, dtype=torch.bfloat16)
    return x, x.clone(), torch.ones(shape[-1], dtype=torch.bfloat16), 1e-6


def _rope(heads: int, kv_heads: int) -> tuple[object, ...]:
    query, key = (torch.zeros(4, n * 64, dtype=torch.bfloat16) for n in (heads, kv_heads))
    cache = torch.zeros(50, 64, dtype=torch.bfloat16)
    return torch.zeros(4, dtype=torch.int64), query, key, 64, cache, True


def _whole(**changes: object) -> tuple[object, ...]:
    half = torch.bfloat16
    given = {
        "qkv": torch.zeros(4, 8 * 64, dtype=half),
        "heads": (4, 2, 2),
        "head_dim": 64,
        "eps": 1e-6,
        "q_weight": torch.ones(64, dtype=half),
        "k_weight": torch.ones(64, dtype=half),
        "cache": torch.zeros(50, 64, dtype=half),
        "is_neox": True,
        "positions": torch.zeros(4, dtype=torch.int64),
    } | changes
    qkv, heads, *rest = given.values()
    return (qkv, *heads, *rest)


_HALF = torch.float16
_FUSED_REFUSALS = {
    "float32": ({"qkv": torch.zeros(4, 512)}, "qkv is float32, and the kernel is for half"),
    "another half": ({"qkv": torch.zeros(4, 512, dtype=_HALF)}, "q_weight is bfloat16, qkv is fl"),
    "float32 weight": ({"k_weight": torch.ones(64)}, "k_weight is float32"),
    "float32 cache": ({"cache": torch.zeros(50, 64)}, "cos_sin_cache is float32"),
    "rows apart": (
        {"qkv": torch.zeros(4, 600, dtype=torch.bfloat16)[:, :512]}, "qkv is not contiguous"),
    "other heads": ({"heads": (4, 2, 1)}, "qkv has shape [4, 512], its heads have 448"),
    "no tokens": (
        {"qkv": torch.zeros(0, 512, dtype=torch.bfloat16),
         "positions": torch.zeros(0, dtype=torch.int64)}, "there are no tokens"),
    "int32 positions": ({"positions": torch.zeros(4, dtype=torch.int32)}, "not int64"),
    "too few positions": (
        {"positions": torch.zeros(3, dtype=torch.int64)}, "position_ids have shape [3] for 4"),
    "short weight": (
        {"q_weight": torch.ones(32, dtype=torch.bfloat16)}, "q_weight has shape [32]"),
    "part of a head": (
        {"cache": torch.zeros(50, 32, dtype=torch.bfloat16)}, "cos_sin_cache has shape [50, 32]"),
    "cache of columns": (
        {"cache": torch.zeros(64, 50, dtype=torch.bfloat16).t()}, "cos_sin_cache is not contig"),
}  # fmt: skip


@pytest.mark.parametrize("name", _FUSED_REFUSALS)
def test_what_the_fused_kernel_raises_on_is_refused_before_the_call(name) -> None:
    assert guard_of("fused_qk_norm_rope", *_whole()) is True
    changes, said = _FUSED_REFUSALS[name]
    assert said in str(guard_of("fused_qk_norm_rope", *_whole(**changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 80, "rotary_dim": 80}, "head_dim 80 is none of 64, 128, 256"),
        ({"rotary_dim": 32}, "rotary_dim 32 is not the whole head of 64"),
        ({"num_heads_k": 0}, "no heads of query or key"),
        ({"k_weight_dtype": torch.float32}, "two dtypes"),
    ],
)
def test_a_module_whose_heads_the_fused_kernel_lacks_is_refused_when_it_is_bound(
    changes, said
) -> None:
    contract = next(c for c in CONTRACTS if c.name == "fused_qk_norm_rope")
    facts = dict(contract.signature.facts_of(*_whole()))
    guard = IMPLS["fused_qk_norm_rope"].supports_layer
    assert guard(facts) is True
    assert said in str(guard(facts | changes))


@pytest.mark.parametrize(
    ("op", "refused", "said", "taken"),
    [
        ("fused_add_rms_norm", _norm((7, 45)), "45 is not a multiple of 8", _norm((7, 48))),
        ("fused_add_rms_norm", _norm((64,)), "x has 1 dimensions", _norm((1, 64))),
        ("rms_norm", (_norm((64,))[0], None, 1e-6), "x has 1 dim", (_norm((1, 64))[0], None, 1e-6)),
        (
            "moe_align_block_size",
            (torch.zeros(3, 2, dtype=torch.int32), 16, 1025),
            "1025 experts; the kernel takes 1024",
            (torch.zeros(3, 2, dtype=torch.int32), 16, 1024),
        ),
        ("rotary_embedding", _rope(3, 2), "no multiple of key's", _rope(4, 2)),
        (
            "per_token_group_quant_fp8",
            (torch.zeros(2, 3, 64, dtype=torch.bfloat16), 32),
            "x has 3 dimensions",
            (torch.zeros(6, 64, dtype=torch.bfloat16), 32),
        ),
    ],
)
def test_what_an_h200_refused_is_refused_before_the_call_and_its_neighbour_taken(
    op, refused, said, taken
) -> None:
    assert said in str(guard_of(op, *refused))
    assert guard_of(op, *taken) is True


def test_kernels_that_turn_nan_into_a_number_are_not_served() -> None:
    assert not {"fatrelu_and_mul", "silu_and_mul_with_clamp", "swigluoai_and_mul"} & set(IMPLS)


def test_a_copy_is_made_only_where_the_address_is_no_vectors() -> None:
    from vllm_fl.backends.vendor.cuda.impl.common import ALIGNMENT, dense

    base = torch.arange(65, dtype=torch.bfloat16)
    assert dense(base[:64]) is not None and dense(base[:64]).data_ptr() == base.data_ptr()
    moved = dense(base[1:])
    assert moved.data_ptr() % ALIGNMENT == 0 and torch.equal(moved, base[1:])


def on_gpu(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cuda:0") -> FakeTensor:
    """The metadata of a tensor; to be called inside a FakeTensorMode."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device(device))


def _malformed() -> dict[str, tuple[str, tuple[object, ...], str]]:
    """What lies elsewhere, or has another form than the kernels read: op, arguments, reason."""
    t, ints = on_gpu, torch.int64
    q, k, positions, cache = t(4, 128), t(4, 64), t(4, dtype=ints), t(16, 64)
    key, page, slots, scale = (
        t(4, 1, 64),
        t(2, 16, 1, 64),
        t(4, dtype=ints),
        t(1, dtype=torch.float32),
    )
    logits, mask = t(4, 100), t(4, 100, dtype=torch.bool)
    out, lse = t(4, 2, 64), t(2, 4, dtype=torch.float32)
    ids = t(4, 2, dtype=torch.int32)
    byte = t(2, 16, 1, 64, dtype=torch.uint8)
    e5m2 = t(2, 16, 1, 64, dtype=torch.float8_e5m2)

    def rope(*args: object) -> tuple[object, ...]:
        return (*args[:3], 64, args[3], True)

    def pages(*args: object) -> tuple[object, ...]:
        return (*args, "auto", scale, scale)

    def cpu(*shape: int, dtype: torch.dtype = torch.float16) -> FakeTensor:
        return t(*shape, dtype=dtype, device="cpu")

    return {
        "weight": ("rms_norm", (q, cpu(128), 1e-6), "weight is on cpu"),
        "residual": ("fused_add_rms_norm", (q, cpu(4, 128), t(128), 1e-6), "residual is on cpu"),
        "positions": (
            "rotary_embedding",
            rope(cpu(4, dtype=ints), q, k, cache),
            "positions is on cpu",
        ),
        "key": ("rotary_embedding", rope(positions, q, cpu(4, 64), cache), "key is on cpu"),
        "wide cache": ("rotary_embedding", rope(positions, q, k, t(16, 256)), "for heads of 64"),
        "flat cache": ("rotary_embedding", rope(positions, q, k, t(64)), "for heads of 64"),
        "no head": ("rotary_embedding", (positions, q, k, 0, cache, True), "for heads of 0"),
        "one row for all": (
            "rotary_embedding",
            rope(positions, t(1, 128).expand(4, 128), k, cache),
            "strides [0, 1]",
        ),
        "too many slots": (
            "reshape_and_cache_flash",
            pages(key, key, page, page, t(400, dtype=ints)),
            "400 slots",
        ),
        "another value": (
            "reshape_and_cache_flash",
            pages(key, t(4, 1, 32), page, page, slots),
            "float16[4, 1, 32]",
        ),
        "flat key": (
            "reshape_and_cache_flash",
            pages(k, k, page, page, slots),
            "key is float16[4, 64]",
        ),
        "narrow page": (
            "reshape_and_cache_flash",
            pages(key, key, t(2, 16, 1, 32), t(2, 16, 1, 32), slots),
            "the cache is float16[2, 16, 1, 32]",
        ),
        "page elsewhere": (
            "reshape_and_cache_flash",
            pages(key, key, cpu(2, 16, 1, 64), page, slots),
            "on cpu",
        ),
        "narrow latent": (
            "concat_and_cache_mla",
            (q, k, t(2, 16, 128), slots, "auto", scale),
            "the cache is",
        ),
        "mask of one": (
            "apply_repetition_penalties",
            (logits, t(1, 3, dtype=torch.bool), mask, t(4)),
            "prompt_mask is bool[1, 3]",
        ),
        "few penalties": (
            "apply_repetition_penalties",
            (logits, mask, mask, t(1)),
            "[1] penalties",
        ),
        "logsumexp of halves": (
            "merge_attn_states",
            (out, t(2, 4), out, lse),
            "prefix_lse is float16",
        ),
        "logits of tokens by tokens": ("topk_softmax", (t(2, 4, 8), 2), "has 3 dimensions"),
        "more choices than experts": ("topk_softmax", (t(4, 8), 9), "9 of 8 experts"),
        "no choice": ("topk_softmax", (t(4, 8), 0), "0 of 8 experts"),
        "a sum of rows": ("moe_sum", (t(4, 8),), "has 2 dimensions"),
        "blocks of none": ("moe_align_block_size", (ids, 0, 8), "blocks have 0 rows"),
        "a short map": (
            "moe_align_block_size",
            (ids, 16, 8, t(4, dtype=torch.int32)),
            "expert_map is int32[4], not int32[8]",
        ),
        "a long map": ("moe_align_block_size", (ids, 16, 8, t(8, dtype=ints)), "is int64[8]"),
        "halves called FP8": (
            "reshape_and_cache_flash",
            (key, key, page, page, slots, "fp8", scale, scale),
            "the cache is float16, kv_cache_dtype 'fp8'",
        ),
        "another FP8": (
            "reshape_and_cache_flash",
            (key, key, e5m2, e5m2, slots, "fp8", scale, scale),
            "the cache is float8_e5m2",
        ),
        "three scales": (
            "reshape_and_cache_flash",
            (key, key, byte, byte, slots, "fp8", t(3, dtype=torch.float32), scale),
            "k_scale is float32[3]",
        ),
        "a double scale": (
            "reshape_and_cache_flash",
            (key, key, byte, byte, slots, "fp8", scale, t(1, dtype=torch.float64)),
            "v_scale is float64[1]",
        ),
        "slots in rows": (
            "reshape_and_cache_flash",
            pages(key, key, page, page, t(2, 2, dtype=ints)),
            "slot_mapping is int64[2, 2]",
        ),
        "a latent called FP8": (
            "concat_and_cache_mla",
            (q, k, t(2, 16, 192), slots, "fp8", scale),
            "the cache is float16",
        ),
        "scales of what": (
            "scaled_fp8_quant",
            (q, t(4, dtype=torch.float32)),
            "group_shape does not say",
        ),
        "a double bound": (
            "scaled_fp8_quant",
            (q, None, None, t(1, dtype=torch.float64), True),
            "scale_ub is float64",
        ),
        "bias of halves": ("topk_softmax", (logits, 2, False, t(100)), "bias is float16"),
    }


with FakeTensorMode():
    MALFORMED = sorted(_malformed())


@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [1, 2])
def test_an_fp8_cache_as_vllm_makes_it_is_taken(cache, scales) -> None:
    with FakeTensorMode():
        key, page = on_gpu(4, 2, 64), on_gpu(2, 16, 2, 64, dtype=cache)
        slots, scale = on_gpu(4, dtype=torch.int64), on_gpu(scales, dtype=torch.float32)
        supports = IMPLS["reshape_and_cache_flash"].supports
        assert supports is not None
        assert supports(key, key, page, page, slots, "fp8", scale, scale) is True


@pytest.mark.parametrize("name", MALFORMED)
def test_what_lies_elsewhere_or_has_another_form_is_refused(name) -> None:
    with FakeTensorMode():
        op, args, said = _malformed()[name]
        supports = IMPLS[op].supports
        assert supports is not None
        assert said in str(supports(*args))


@pytest.mark.parametrize(
    ("op", "args", "shapes"),
    [
        ("rms_norm", (torch.ones(0, 64), torch.ones(64), 1e-6), [(0, 64)]),
        (
            "fused_add_rms_norm",
            (torch.ones(0, 64), torch.ones(0, 64), torch.ones(64), 1e-6),
            [(0, 64), (0, 64)],
        ),
        ("topk_softmax", (torch.ones(0, 16), 2), [(0, 2), (0, 2)]),
        ("moe_sum", (torch.ones(0, 2, 64),), [(0, 64)]),
    ],
)
def test_nothing_is_launched_for_no_tokens(op, args, shapes) -> None:
    """An H200 calls an empty launch an error, and tells it to the next one."""
    result = IMPLS[op].fn(*args)
    found = result if isinstance(result, tuple) else (result,)
    assert [tuple(t.shape) for t in found] == shapes
