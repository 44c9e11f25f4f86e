"""Calls of public operators that together reach every call of torch_npu in `mindspeed/ops/npu`, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch

import mindspeed.ops as ops
from mindspeed.ops.npu_ring_attention_update import token_major
from tests.npu_contract.attention_cases import attention_cases
from tests.npu_contract.case import (
    ANY,
    BF16,
    FP16,
    FP32,
    HALF,
    INT8,
    INT32,
    INT64,
    ONLY_BF16,
    Call,
    Case,
    Make,
    statistics,
)


def _rms_norm(shape: tuple[int, ...], gamma: tuple[int, ...]) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x, g = m.leaf(*shape), m.leaf(*gamma)
        return lambda: ops.rms_norm(x, g, 1e-5)

    return case


def _rms_norm_residual(m: Make) -> Call:
    x, residual, g = m.leaf(3, 5, 16), m.leaf(3, 5, 16), m.leaf(16)
    return lambda: ops.rms_norm_residual(x, residual, g, 1e-5)


def _swiglu(dim: int) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x = m.leaf(4, 6, 8)
        return lambda: ops.swiglu(x, dim)

    return case


def _rotary(x: tuple[int, ...], table: tuple[int, ...], mode: int, learned: bool = False, wide: bool = False) -> Any:
    def case(m: Make) -> Call:
        kind = FP32 if wide else m.dtype
        tokens = m.leaf(*x)
        cos, sin = (m.leaf(*table, dtype=kind) if learned else m.normal(*table, dtype=kind) for _ in range(2))
        return lambda: ops.npu_rotary_position_embedding(tokens, cos, sin, mode)

    return case


def _ring(layout: str, softmax_layout: str = "", ends: tuple[int, ...] | None = None) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        shape, rows = ((6, 2, 8), (2, 4, 6)) if layout == "SBH" else ((6, 4, 64), (6, 4))
        outs = [m.normal(*shape) for _ in range(2)]
        stats = [statistics(m, *rows), statistics(m, *rows, unseen=0 if layout == "SBH" else 3)]
        if layout == "TND" and m.device == "cpu":  # a row that saw nothing has the result 0
            seen = [s if ends is None else token_major(s, torch.tensor(ends)) for _, s in stats]
            outs = [out * (s[..., :1] > 0) for out, s in zip(outs, seen, strict=True)]
        more = {"actual_seq_qlen": ends, "layout": layout, "softmax_layout": softmax_layout}
        return lambda: ops.npu_ring_attention_update(outs[0], *stats[0], outs[1], *stats[1], **more)

    return case


def _dropout(norm: str, residual: bool, scaled: bool) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        operator = getattr(ops, f"npu_dropout_add_{norm}_norm")
        x0, weight = m.leaf(2, 3, 16), m.leaf(16)
        bias = m.leaf(16) if norm == "layer" else None
        other = m.leaf(2, 3, 16) if residual else None
        scales = (m.leaf(2, 3), m.leaf(16)) if scaled else (None, None)
        return lambda: operator(x0, other, weight, bias, 0.0, 1e-5, *scales, prenorm=True)

    return case


def _dropped(m: Make) -> Call:
    x0, weight, bias, other = m.leaf(2, 3, 16), m.leaf(16), m.leaf(16), m.leaf(2, 3, 16, dtype=FP32)

    def call() -> Any:
        torch.manual_seed(1)
        return ops.npu_dropout_add_layer_norm(x0, other, weight, bias, 0.3, 1e-5)

    return call


def _permute(kept: int | None, choices: int = 2) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        tokens = m.leaf(6, 16)
        indices = m.integers(0, 4, 6, choices) if choices else m.integers(0, 4, 6)
        return lambda: ops.npu_fused_moe_token_permute(tokens, indices, kept)

    return case


def _unpermute(rows: int, weighted: bool) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        permuted = m.leaf(rows, 16)
        slots = m.given(torch.randperm(12, generator=torch.Generator().manual_seed(3)).to(INT32))
        probs = m.leaf(6, 2) if weighted else None
        return lambda: ops.npu_fused_moe_token_unpermute(permuted, slots, probs)

    return case


def _gmm(operator: str, groups: tuple[int, ...], bias: bool = False) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x, weight = m.leaf(10, 16), m.leaf(len(groups), 16, 8)
        added = m.normal(len(groups), 8, dtype=FP16 if m.dtype == FP16 else FP32) if bias else None
        listed = m.given(torch.tensor(groups)) if len(groups) == 1 else list(groups)
        return lambda: getattr(ops, operator)(x, weight, bias=added, group_list=listed)

    return case


def _gmm_separate(m: Make) -> Call:
    x, *weights = m.leaf(10, 16), m.leaf(16, 8), m.leaf(16, 8), m.leaf(16, 8)
    ends = m.given(torch.tensor([3, 3, 10]))
    return lambda: ops.npu_gmm(x, weights, group_list=ends)


def _gmm_sum(m: Make) -> Call:
    x, weight, ends = m.leaf(16, 10), m.leaf(10, 8), m.given(torch.tensor([3, 3, 10]))
    return lambda: ops.npu_gmm(x, weight, group_list=ends, group_type=2)


def _gmm_fused(m: Make) -> Call:
    x, weight = m.leaf(10, 16), m.leaf(3, 16, 8)
    original = m.normal(3, 16, 8).requires_grad_()
    original.zero_out_wgrad = True  # type: ignore[attr-defined]
    original.main_grad = m.normal(3, 16, 8, dtype=FP32)  # type: ignore[attr-defined]
    m.written.append(original.main_grad)  # type: ignore[attr-defined]
    ends = m.given(torch.tensor([3, 3, 10]))
    call = {"group_list": ends, "gemm_fusion": True, "original_weight": original}
    return lambda: ops.npu_gmm(x, weight, **call)  # type: ignore[arg-type]


def _matmul_add(m: Make) -> Call:
    tokens, grads, total = m.normal(6, 16), m.normal(6, 8), m.normal(8, 16, dtype=FP32)
    return lambda: [ops.npu_matmul_add_fp32(tokens, grads, total), total]


def _groupmatmul_add(m: Make) -> Call:
    x, dy, total = m.normal(10, 16), m.normal(10, 8), m.normal(3 * 16, 8, dtype=FP32)
    ends = m.given(torch.tensor([3, 3, 10]))
    return lambda: [ops.npu_groupmatmul_add_fp32(x, dy, ends, total), total]


def _quant(operator: str, output: torch.dtype, scales: torch.dtype, per_token: bool, activation: int) -> Any:
    def case(m: Make) -> Call:
        x, weight = m.integers(-9, 9, 10, 16, dtype=INT8), m.integers(-9, 9, 3, 16, 8, dtype=INT8)
        scale = (m.normal(3, 8, dtype=FP32).abs() + 0.1) / 20
        if scales == INT64:
            bits = scale.view(INT32).to(INT64)
            scale = bits & 0xFFFFFFFF
        more = {
            "per_token_scale": m.normal(10, dtype=FP32).abs() if per_token else None,
            "bias": m.integers(-9, 9, 3, 8, dtype=INT32),
            "group_list": [3, 3, 10] if operator == "quant_gmm" else [3, 0, 7],
            "output_dtype": output,
            "act_type": activation,
        }
        return lambda: getattr(ops, operator)(x, weight, scale.to(scales), **more)

    return case


def _ffn(activation: str, experts: str | None) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        leading = (2,) if experts else ()
        kind = FP32 if m.dtype == BF16 else m.dtype
        x, w1, w2 = m.normal(10, 16), m.normal(*leading, 16, 8), m.normal(*leading, 8, 16)
        biases = {"bias1": m.normal(*leading, 8, dtype=kind), "bias2": m.normal(*leading, 16, dtype=kind)}
        more: dict[str, Any] = {} if experts is None else {experts: [4, 6] if experts == "expert_tokens" else [4, 10]}
        return lambda: ops.ffn(x, w1, w2, activation, **biases, **more)

    return case


def _ffn_int8(m: Make) -> Call:
    x, w1, w2 = (m.integers(-9, 9, *shape, dtype=INT8) for shape in ((10, 16), (16, 8), (8, 16)))
    biases = {"bias1": m.integers(-9, 9, 8, dtype=INT32), "bias2": m.integers(-9, 9, 16, dtype=INT32)}
    scales = {"scale": m.normal(1, dtype=FP32).abs() + 1, "offset": m.normal(1, dtype=FP32)}
    scales |= {"deq_scale1": m.normal(8, dtype=BF16) / 50, "deq_scale2": m.normal(16, dtype=BF16) / 50}
    return lambda: ops.ffn(x, w1, w2, "relu", **biases, **scales, output_dtype=BF16)


def _ffn_int8_weights(m: Make) -> Call:
    w1, w2 = (m.integers(-9, 9, *shape, dtype=INT8) for shape in ((16, 8), (8, 16)))
    x, names, widths = m.normal(10, 16), ("antiquant_scale", "antiquant_offset"), (8, 16)
    more = {f"{name}{i + 1}": m.normal(widths[i]) / 10 for name in names for i in range(2)}
    return lambda: ops.ffn(x, w1, w2, "silu", **more)


def _mm_all_reduce(operator: str, kind: str) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x1, x2, residual, gamma = m.normal(2, 3, 64), m.normal(64, 8), m.normal(2, 3, 8), m.normal(8)
        more: dict[str, Any] = {"bias": m.normal(8)}
        if kind == "int8":
            x1, x2 = m.integers(-9, 9, 2, 3, 64, dtype=INT8), m.integers(-9, 9, 64, 8, dtype=INT8)
            scale = m.normal(8, dtype=BF16) if m.dtype == BF16 else m.integers(1, 9, 8)
            more = {"bias": m.integers(-9, 9, 8, dtype=INT32), "dequant_scale": scale}
        elif kind == "int8 weights":
            x2 = m.integers(-9, 9, 64, 8, dtype=INT8)
            more |= {"antiquant_scale": m.normal(2, 8), "antiquant_offset": m.normal(2, 8), "antiquant_group_size": 32}
        return lambda: getattr(ops, operator)(x1, x2, residual, gamma, m.groups["TP"], **more)

    return case


def _grouped_all_reduce(m: Make) -> Call:
    x, weight = [m.normal(3, 16), m.normal(5, 8)], [m.normal(16, 8), m.normal(8, 4)]
    bias = [m.given(torch.linspace(-1, 1, n).to(m.dtype)) for n in (8, 4)]  # the same on every rank
    return lambda: ops.npu_grouped_mat_mul_all_reduce(x, weight, m.groups["TP"], bias=bias)


def _coc(name: str, rows: float, groups: tuple[str, ...], gathers: bool = False) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x1, x2, bias = m.normal(8, 256), m.normal(256, 4), m.normal(1, 4)
        outputs = [m.normal(int(8 * rows), 4)] + ([m.normal(16, 256)] if gathers else [])
        operator, given = getattr(ops.lcal_coc, name), [m.groups[group] for group in groups]
        return lambda: operator(x1, x2, *outputs, *given, bias=bias)

    return case


def _a2a(shard_type: int, act: str) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x = m.normal(4, 6, 8) if shard_type == 0 else m.normal(4, 3, 16)
        weight, bias = m.normal(2, 16, 4), m.normal(2, 4)
        more: dict[str, Any] = {"act_type": act, "need_allgather_out": True, "need_activation_feature": True}
        groups = (m.groups["EP"], 2, m.groups["TP"], 2)
        return lambda: ops.npu_all_to_all_all_gather_bmm(x, weight, *groups, bias=bias, shard_type=shard_type, **more)

    return case


def _rs(shard_type: int) -> Callable[[Make], Call]:
    def case(m: Make) -> Call:
        x, weight, bias = m.normal(2, 8, 4), m.normal(2, 4, 8), m.normal(2, 8 if shard_type else 4)
        groups = (m.groups["EP"], 2, m.groups["TP"], 2)
        return lambda: ops.npu_bmm_reduce_scatter_all_to_all(x, weight, *groups, bias=bias, shard_type=shard_type)

    return case


CASES: tuple[Case, ...] = (
    Case("rms_norm", "rows", _rms_norm((4, 6, 16), (16,)), ("npu_rms_norm",), ("npu_rms_norm_backward",)),
    Case("rms_norm", "two dimensions", _rms_norm((4, 6, 16), (6, 16)), ("npu_rms_norm",), ("npu_rms_norm_backward",)),
    Case("rms_norm", "residual", _rms_norm_residual, ("npu_add_rms_norm",), ("npu_rms_norm_backward",)),
    Case("swiglu", "last dimension", _swiglu(-1), ("npu_swiglu",), ("npu_swiglu_backward",)),
    Case("swiglu", "another dimension", _swiglu(1), ("npu_swiglu",), ("npu_swiglu_backward",)),
    *(
        Case("npu_rotary_position_embedding", what, call, ("npu_rotary_mul",), backward)
        for what, call, backward in (
            ("BNSD", _rotary((2, 3, 5, 8), (1, 1, 5, 8), 0), ("npu_rotary_mul",)),
            ("SBND", _rotary((5, 2, 3, 8), (5, 1, 1, 8), 0), ("npu_rotary_mul",)),
            ("neighbours", _rotary((2, 5, 3, 8), (1, 5, 1, 8), 1), ("npu_rotary_mul",)),
            ("wide tables", _rotary((2, 5, 3, 8), (2, 5, 1, 8), 0, wide=True), ("npu_rotary_mul",)),
            ("learned", _rotary((2, 3, 5, 8), (1, 1, 5, 8), 0, True), ("npu_rotary_mul", "npu_rotary_mul_backward")),
            ("learned neighbours", _rotary((2, 3, 5, 8), (1, 1, 5, 8), 1, True), ("npu_rotary_mul", "npu_rotary_mul_backward")),
        )
    ),
    *attention_cases(),
    *(
        Case("npu_ring_attention_update", what, call, ("npu_ring_attention_update",))
        for what, call in (
            ("SBH", _ring("SBH")),
            ("TND", _ring("TND", ends=(2, 2, 6))),
            ("TND from 0", _ring("TND", ends=(0, 2, 6))),
            ("TND by token", _ring("TND", "TND")),
        )
    ),
    Case(
        "npu_dropout_add_layer_norm",
        "LayerNorm of a sum",
        _dropout("layer", True, True),
        ("npu_add_layer_norm",),
        (),
    ),
    Case("npu_dropout_add_layer_norm", "LayerNorm after dropout", _dropped, ("npu_add_layer_norm",), ()),
    Case("npu_dropout_add_layer_norm", "LayerNorm alone", _dropout("layer", False, False), (), ()),
    *(
        Case("npu_dropout_add_layer_norm", what, call, (norm,), ("npu_rms_norm_backward",))
        for what, call, norm in (
            ("RMSNorm of a sum", _dropout("rms", True, True), "npu_add_rms_norm"),
            ("RMSNorm alone", _dropout("rms", False, False), "npu_rms_norm"),
        )
    ),
    *(
        Case(
            "npu_fused_moe_token_permute", what, call, ("npu_moe_token_permute",), ("npu_moe_token_permute_grad_v2",), ONLY_BF16
        )
        for what, call in (("all", _permute(None)), ("some kept", _permute(7)), ("some dropped", _permute(-3)))
    ),
    Case(
        "npu_fused_moe_token_permute",
        "one expert each",
        _permute(None, 0),
        ("npu_moe_token_permute",),
        ("npu_moe_token_unpermute",),
        ONLY_BF16,
    ),
    *(
        Case(
            "npu_fused_moe_token_unpermute",
            what,
            call,
            ("npu_moe_token_unpermute",),
            ("npu_moe_token_unpermute_grad_v2",),
            ONLY_BF16,
        )
        for what, call in (
            ("plain", _unpermute(12, False)),
            ("weighted", _unpermute(12, True)),
            ("dropped", _unpermute(9, True)),
        )
    ),
    *(
        Case("npu_gmm", what, call, ("npu_grouped_matmul",), backward)
        for what, call, backward in (
            ("ends", _gmm("npu_gmm", (3, 3, 10)), ("npu_grouped_matmul",) * 2),
            ("sizes", _gmm("npu_gmm_v2", (3, 0, 7)), ("npu_grouped_matmul",) * 2),
            ("one size", _gmm("npu_gmm_v2", (10,)), ("npu_grouped_matmul",) * 2),
            ("bias", _gmm("npu_gmm", (3, 3, 10), bias=True), ("npu_grouped_matmul",) * 2),
            ("separate", _gmm_separate, ("npu_grouped_matmul",) * 2),
            ("sums", _gmm_sum, ("npu_grouped_matmul",) * 2),
        )
    ),
    Case(
        "npu_gmm",
        "fused gradient",
        _gmm_fused,
        ("npu_grouped_matmul",),
        ("npu_grouped_matmul", "npu_grouped_matmul_add_"),
        HALF,
    ),
    Case("npu_matmul_add_fp32", "", _matmul_add, ("npu_grouped_matmul_add_",), types=HALF),
    Case("npu_groupmatmul_add_fp32", "", _groupmatmul_add, ("npu_grouped_matmul_add_",), types=HALF),
    *(
        Case("quant_gmm", what, call, ("npu_grouped_matmul",), types=ONLY_BF16)
        for what, call in (
            ("bf16", _quant("quant_gmm", BF16, BF16, False, 0)),
            ("fp16 by sizes", _quant("npu_quant_gmm_v2", FP16, FP32, True, 4)),
            ("int8", _quant("quant_gmm", INT8, INT64, False, 0)),
        )
    ),
    *(
        Case("ffn", what, call, ("npu_ffn",), types=types)
        for what, call, types in (
            ("fastgelu", _ffn("fastgelu", None), HALF),
            ("tokens of experts", _ffn("relu", "expert_tokens"), HALF),
            ("ends of experts", _ffn("silu", "expert_tokens_index"), HALF),
            ("int8", _ffn_int8, ONLY_BF16),
            ("int8 weights", _ffn_int8_weights, HALF),
        )
    ),
    *(
        Case(operator, kind, _mm_all_reduce(operator, kind), ("npu_mm_all_reduce_base", "npu_add_rms_norm"), None, HALF, True)
        for operator in ("npu_mm_all_reduce_add_rms_norm", "npu_mm_all_reduce_add_rms_norm_")
        for kind in ("plain", "int8", "int8 weights")
    ),
    Case("npu_grouped_mat_mul_all_reduce", "", _grouped_all_reduce, ("npu_mm_all_reduce_base",) * 2, None, HALF, True),
    *(
        Case("lcal_coc", what, call, forward, None, HALF, True)
        for what, call, forward in (
            ("product", _coc("pure_matmul", 1, ()), ()),
            ("all-reduce", _coc("matmul_all_reduce", 1, ("TP",)), ("npu_mm_all_reduce_base",)),
            ("all-gather", _coc("all_gather_matmul", 2, ("TP",)), ("npu_all_gather_base_mm",)),
            ("all-gather kept", _coc("all_gather_matmul_v2", 2, ("TP",), True), ("npu_all_gather_base_mm",)),
            ("reduce-scatter", _coc("matmul_reduce_scatter", 0.5, ("TP",)), ("npu_mm_reduce_scatter_base",)),
            ("both", _coc("all_gather_matmul_reduce_scatter", 1, ("EP", "TP")), ("npu_mm_reduce_scatter_base",)),
        )
    ),
    *(
        Case("npu_all_to_all_all_gather_bmm", f"{shard} {act}", _a2a(shard, act), ("npu_grouped_matmul",), None, ANY, True)
        for shard, act in ((0, "none"), (1, "silu"))
    ),
    *(
        Case("npu_bmm_reduce_scatter_all_to_all", f"{shard}", _rs(shard), ("npu_grouped_matmul",), None, ANY, True)
        for shard in (0, 1)
    ),
)
