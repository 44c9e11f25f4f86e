"""Rows G1 to G4 and G8: operators that are as fast as memory, so their ceiling is a copy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accelerator.operation import Case, Function, Operation, cases, device, randn, size_of
from mindspeed.ops import (
    npu_dropout_add_layer_norm,
    npu_fused_moe_token_permute,
    npu_fused_moe_token_unpermute,
    npu_ring_attention_update,
    npu_rotary_position_embedding,
    rms_norm,
    rms_norm_residual,
    swiglu,
)

EPSILON = 1e-6


def _liger(name: str) -> Function | None:
    """A function of Liger's functional interface, if it is installed."""
    if find_spec("liger_kernel") is None or device().type == "cpu":
        return None
    try:
        from liger_kernel.transformers import functional
    except ImportError:  # it may want packages that are not here
        return None
    found: Function | None = getattr(functional, name, None)
    return found


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * gamma.float()).to(x.dtype)


def _rms_norm(width: int, small: bool) -> Operation:
    rows, width = (5, 48) if small else (16384, width)
    x, gamma = randn(rows, width), randn(width)
    peers: dict[str, Any] = {"F.rms_norm": lambda x, gamma: F.rms_norm(x, (width,), gamma, EPSILON)}
    if liger := _liger("liger_rms_norm"):
        peers["Liger"] = lambda x, gamma: liger(x, gamma, EPSILON, in_place=False)
    targets = {"Liger": 1.5} if liger else {}
    one = size_of(x)
    return Operation(lambda x, g: rms_norm(x, g, EPSILON), _norm, (x, gamma), 2 * one, 3 * one, peers, targets)


def _rms_norm_residual(small: bool) -> Operation:
    rows, width = (5, 48) if small else (16384, 8192)
    x, residual, gamma = randn(rows, width), randn(rows, width), randn(width)

    def formula(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual.float()
        scaled = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON) * gamma.float()
        return scaled.to(x.dtype), total.to(x.dtype)

    peers: dict[str, Any] = {}
    if liger := _liger("liger_fused_add_rms_norm"):
        peers["Liger"] = lambda x, residual, gamma: liger(x, residual, gamma, EPSILON, in_place=False)
    one = size_of(x)
    return Operation(
        lambda x, r, g: rms_norm_residual(x, r, g, EPSILON), formula, (x, residual, gamma), 4 * one, 4 * one, peers
    )


def _dropout_add_layer_norm(small: bool) -> Operation:
    rows, width = (5, 48) if small else (16384, 8192)
    x, residual, weight, bias = randn(rows, width), randn(rows, width), randn(width), randn(width)

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return npu_dropout_add_layer_norm(x, residual, weight, bias, 0.0, EPSILON, prenorm=True)

    def formula(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual.float()
        return F.layer_norm(total, (width,), weight.float(), bias.float(), EPSILON).to(x.dtype), total.to(x.dtype)

    one = size_of(x)
    return Operation(function, formula, (x, residual, weight, bias), 4 * one, 5 * one)


def _swiglu(width: int, small: bool) -> Operation:
    rows, width = (5, 24) if small else (16384, width)
    x = randn(rows, 2 * width)

    def formula(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return (F.silu(a) * b).to(x.dtype)

    peers: dict[str, Any] = {}
    if liger := _liger("liger_swiglu"):
        peers["Liger"] = (liger, tuple(half.detach().contiguous().requires_grad_() for half in x.chunk(2, -1)))
    one = size_of(x)
    return Operation(swiglu, formula, (x,), 1.5 * one, 2.5 * one, peers)


def _rotary(mode: int, small: bool) -> Operation:
    length, heads, width = (3, 4, 16) if small else (8192, 64, 128)
    q, k = randn(length, 1, heads, width), randn(length, 1, max(heads // 8, 1), width)
    angles = torch.outer(torch.arange(length, device=device()), 10000 ** -torch.linspace(0, 1, width // 2, device=device()))
    angles = (torch.cat((angles, angles), -1) if mode == 0 else angles.repeat_interleave(2, -1)).view(length, 1, 1, width)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def turned(x: Tensor) -> Tensor:
        if mode == 0:
            first, second = x.chunk(2, -1)
            return torch.cat((-second, first), -1)
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        wide = [t.float() for t in tensors]
        return tuple((x * cos.float() + turned(x) * sin.float()).bfloat16() for x in wide)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(npu_rotary_position_embedding(x, cos, sin, mode) for x in tensors)

    peers: dict[str, Any] = {}
    if mode == 0 and (liger := _liger("liger_rope")):
        views = tuple(t.detach().clone().permute(1, 2, 0, 3).requires_grad_() for t in (q, k))
        tables = cos.view(1, length, width), sin.view(1, length, width)
        peers["Liger"] = (lambda q, k: liger(q, k, *tables), views)
    both = size_of(q, k)
    return Operation(function, formula, (q, k), 2 * both, 2 * both, peers)


def _ring_update(small: bool) -> Operation:
    length, heads, width = (3, 2, 16) if small else (8192, 32, 128)
    outs = [randn(length, 1, heads * width, dtype=torch.float32, grad=False) for _ in range(2)]
    stats = [randn(1, heads, length, 1, dtype=torch.float32, grad=False) for _ in range(4)]
    stats = [(stat.exp() if n % 2 else stat).expand(-1, -1, -1, 8).contiguous() for n, stat in enumerate(stats)]

    def formula(out1: Tensor, max1: Tensor, sum1: Tensor, out2: Tensor, max2: Tensor, sum2: Tensor) -> tuple[Tensor, ...]:
        maximum = torch.maximum(max1, max2)
        share1, share2 = sum1 * torch.exp(max1 - maximum), sum2 * torch.exp(max2 - maximum)
        total = share1 + share2
        weights = [(share / total)[..., :1].permute(2, 0, 1, 3) for share in (share1, share2)]
        parts = [out.view(length, 1, heads, width) * weight for out, weight in zip((out1, out2), weights, strict=True)]
        return (parts[0] + parts[1]).view(out1.shape), maximum, total

    inputs = (outs[0], *stats[:2], outs[1], *stats[2:])
    return Operation(npu_ring_attention_update, formula, inputs, 1.5 * size_of(*inputs))


def _experts(small: bool) -> tuple[int, int, int, Tensor]:
    tokens, width, topk, experts = (6, 24, 2, 4) if small else (32768, 7168, 8, 64)
    indices = torch.rand(tokens, experts, device=device()).argsort(1)[:, :topk]
    return tokens, width, topk, indices


def _permute(small: bool) -> Operation:
    tokens, width, topk, indices = _experts(small)
    x = randn(tokens, width)

    def formula(x: Tensor) -> Tensor:
        return x[torch.argsort(indices.flatten(), stable=True) // topk]

    moved = size_of(x) * (1 + topk)
    return Operation(lambda x: npu_fused_moe_token_permute(x, indices)[0], formula, (x,), moved, moved, {"index": formula})


def _unpermute(small: bool) -> Operation:
    tokens, width, topk, indices = _experts(small)
    with torch.no_grad():
        rows, slots = npu_fused_moe_token_permute(randn(tokens, width), indices)
    rows, probs, by_token = rows.requires_grad_(), randn(tokens, topk, dtype=torch.float32), slots.long().view(tokens, topk)

    def formula(rows: Tensor, probs: Tensor) -> Tensor:
        out = torch.zeros(tokens, width, device=rows.device)
        for k in range(topk):
            out = out + rows[by_token[:, k]].float() * probs[:, k, None]
        return out.to(rows.dtype)

    def function(rows: Tensor, probs: Tensor) -> Tensor:
        return npu_fused_moe_token_unpermute(rows, slots, probs)

    one = size_of(rows)
    return Operation(function, formula, (rows, probs), one * (1 + 1 / topk), one * (2 + 1 / topk), {"index": formula})


CASES: list[Case] = [
    *(
        case
        for width in (4096, 8192, 16384)
        for case in cases("G1", f"rms_norm 16384 x {width}", lambda small, width=width: _rms_norm(width, small))  # type: ignore[misc]
    ),
    *cases("G1", "rms_norm_residual 16384 x 8192", _rms_norm_residual),
    *cases("G1", "dropout_add_layer_norm 16384 x 8192", _dropout_add_layer_norm),
    *(
        case
        for width in (11008, 14336)
        for case in cases("G2", f"swiglu 16384 x {width}", lambda small, width=width: _swiglu(width, small))  # type: ignore[misc]
    ),
    *(
        case
        for mode, name in ((0, "halves"), (1, "neighbours"))
        for case in cases("G3", f"rotary q and k, {name}, 8192 x 64 and 8 x 128", lambda small, mode=mode: _rotary(mode, small))  # type: ignore[misc]
    ),
    *cases("G4", "ring update 8192 x 32 x 128 fp32", _ring_update, backward=False),
    *cases("G8", "token permute 32768 x 7168, 8 experts each", _permute),
    *cases("G8", "token unpermute 32768 x 7168, 8 experts each", _unpermute),
]
