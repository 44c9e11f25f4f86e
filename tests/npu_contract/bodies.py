"""Plain formulas behind the operators of torch_npu, so that the kernels for NPU run on CPU tensors.

Each is written from the documentation of torch_npu, not from our references: same schema, values in fp32. Where torch_npu
leaves a result open, a body gives the worst: a row of attention that sees nothing is not a number unless ``inner_precise`` is
2, and the statistics of such a row are the largest finite numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu_contract import schemas

_LARGEST = torch.finfo(torch.float32).max


def _rms(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = list(range(-gamma.dim(), 0))
    rstd = (x.float().pow(2).mean(dims, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms(x, gamma, epsilon)


def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dims, normal = list(range(-gamma.dim(), 0)), x.float() * rstd
    g = dy.float() * gamma.float()
    dx = (g - normal * (g * normal).mean(dims, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy.float() * normal).sum_to_size(gamma.shape)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    y, rstd = _rms(total, gamma, epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


def npu_add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    variance, mean = torch.var_mean(total, -1, correction=0, keepdim=True)
    rstd = (variance + epsilon).rsqrt()
    y = ((total - mean) * rstd * gamma.float() + beta.float()).to(x1.dtype)
    return y, mean, rstd, total.to(x1.dtype) if additional_output else torch.full_like(x1, torch.nan)


def _swiglu(x: Tensor, dim: int) -> Tensor:
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(a) * b


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    return _swiglu(x.float(), dim).to(x.dtype)


def npu_swiglu_backward(dy: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.float().chunk(2, dim)
    s, dy = torch.sigmoid(a), dy.float()
    return torch.cat((dy * b * (s + a * s * (1 - s)), dy * a * s), dim).to(x.dtype)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
    pairs = x.unflatten(-1, (-1, 2))
    return x * cos + torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2) * sin


def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    assert x.dtype == r1.dtype == r2.dtype
    return _rotary(x.float(), r1.float(), r2.float(), rotary_mode).to(x.dtype)


def npu_rotary_mul_backward(dy: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> tuple[Tensor, ...]:
    assert dy.dtype == x.dtype == r1.dtype
    zero, one = torch.zeros_like(x, dtype=torch.float32), torch.ones_like(x, dtype=torch.float32)
    turned = _rotary(x.float(), zero, one, rotary_mode)
    dx = dy.float() * r1.float() - _rotary(dy.float() * r2.float(), zero, one, rotary_mode)
    tables = (dy.float() * other for other in (x.float(), turned))
    return (dx.to(x.dtype), *(table.sum_to_size(r1.shape).to(x.dtype) for table in tables))


def npu_ring_attention_update(
    out1: Tensor,
    max1: Tensor,
    sum1: Tensor,
    out2: Tensor,
    max2: Tensor,
    sum2: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    maximum = torch.maximum(max1, max2)
    a, b = sum1 * (max1 - maximum).exp(), sum2 * (max2 - maximum).exp()
    total = a + b

    def weight(share: Tensor) -> Tensor:
        w = (share / total)[..., 0]
        if input_layout == "SBH":
            s, batch, h = out1.shape
            return w.permute(2, 0, 1).repeat_interleave(h // w.shape[1], -1).reshape(s, batch, h)
        assert actual_seq_qlen is not None
        assert actual_seq_qlen[0] == 0
        assert actual_seq_qlen[-1] == out1.shape[0]
        if input_softmax_layout == "":
            lanes = (share / total).flatten()
            spans = list(zip(actual_seq_qlen[:-1].tolist(), actual_seq_qlen[1:].tolist(), strict=True))
            size = w.shape[1] * 8
            w = torch.cat([lanes[i * size : j * size].view(-1, j - i, 8)[..., 0].t() for i, j in spans if j > i])
        return w[..., None]

    merged = out1.float() * weight(a) + out2.float() * weight(b)
    return merged.to(out1.dtype), maximum, total


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    order = indices.flatten().sort(stable=True).indices
    count = num_out_tokens or order.numel()
    return tokens[order[:count] // indices.shape[1]], order.argsort().to(torch.int32)


def _slots(indices: Tensor, count: int) -> Tensor:
    """For each of ``count`` rows the slot that it came from."""
    return indices.argsort()[:count]


def npu_moe_token_permute_grad_v2(
    grad: Tensor, indices: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype, num_topK: int, padded_mode: bool = False
) -> Tensor:
    out = torch.zeros(tokens_size_0, grad.shape[1])
    return out.index_add_(0, _slots(indices, grad.shape[0]) // num_topK, grad.float()).to(tokens_dtype)


def npu_moe_token_unpermute(
    rows: Tensor, indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False, restore_shape: Any = None
) -> Tensor:
    topk = 1 if probs is None else probs.shape[1]
    slots = _slots(indices, rows.shape[0])
    weighted = rows.float() if probs is None else rows.float() * probs.float().flatten()[slots, None]
    return torch.zeros(indices.numel() // topk, rows.shape[1]).index_add_(0, slots // topk, weighted).to(rows.dtype)


def npu_moe_token_unpermute_grad_v2(
    dy: Tensor,
    indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    slots = _slots(indices, permuted_tokens_size_0)
    if probs is None:
        return dy[slots].to(permuted_tokens_dtype), None
    assert permuted_tokens is not None
    rows = dy.float()[slots // probs.shape[1]]
    dprobs = torch.zeros(probs.numel())
    dprobs[slots] = (rows * permuted_tokens.float()).sum(-1)
    drows = rows * probs.float().flatten()[slots, None]
    return drows.to(permuted_tokens_dtype), dprobs.view(probs.shape).to(probs.dtype)


_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda y: y,
    1: F.relu,
    2: lambda y: F.gelu(y, approximate="tanh"),
    4: lambda y: y * torch.sigmoid(1.702 * y),
    5: F.silu,
}


def _spans(group_list: Tensor, kind: int | None) -> list[tuple[int, int]]:
    ends = (group_list if kind == 0 else group_list.cumsum(0)).tolist()
    assert kind == 0 or len(ends) > 1, "a list of a single size is refused"
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _scale(scale: Tensor) -> Tensor:
    """int64 scales hold the bits of fp32 in their lower half."""
    return scale.float() if scale.dtype != torch.int64 else scale.to(torch.int32).view(torch.float32)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | torch.dtype | None = None,
    **none: Any,
) -> list[Tensor]:
    (a,) = x
    b = weight[0] if len(weight) == 1 else weight
    assert split_item == 3
    assert not any(value is not None for value in none.values())
    if group_type == 2:
        parts = [a[:, i:j].float() @ b[i:j].float() for i, j in _spans(group_list, group_list_type)]
        return [torch.stack(parts).to(a.dtype)]
    results = []
    for e, (i, j) in enumerate(_spans(group_list, group_list_type)):
        y = a[i:j].float() @ b[e].float()
        y = y if bias is None else y + bias[0][e].float()
        y = y if scale is None else y * _scale(scale[0])[e]
        y = y if per_token_scale is None else y * per_token_scale[0][i:j, None]
        results.append(_ACTIVATIONS[act_type or 0](y))
    by_number = {15: torch.bfloat16, 5: torch.float16}
    dtype = by_number[int(output_dtype)] if isinstance(output_dtype, int) else output_dtype or a.dtype
    whole = torch.cat(results)
    return [whole.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else whole.to(dtype)]


def npu_grouped_matmul_add_(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    assert total.dtype == torch.float32
    assert total.dim() == 3
    for e, (i, j) in enumerate(_spans(group_list, group_list_type)):
        total[e] += x[i:j].float().t() @ weight[i:j].float()
    return total


def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: list[int] | None = None,
    expert_tokens_index: list[int] | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
    **more: Any,
) -> Tensor:
    names = {"relu": 1, "fastgelu": 4, "silu": 5}
    act = _ACTIVATIONS[names[activation]]
    if expert_tokens is None and expert_tokens_index is None:
        experts = [(slice(None), weight1, weight2, more)]
    else:
        spans = _spans(torch.tensor(expert_tokens or expert_tokens_index), int(expert_tokens is not None))
        experts = []
        for e, (i, j) in enumerate(spans):
            own = {name: None if value is None else value[e] for name, value in more.items()}
            experts.append((slice(i, j), weight1[e], weight2[e], own))
    out = torch.empty(*x.shape[:-1], weight2.shape[-1])
    for rows, w1, w2, own in experts:
        get = own.get
        hidden = _layer(x[rows], w1, get("bias1"), get("antiquant_scale1"), get("antiquant_offset1"))
        if get("deq_scale1") is not None:
            hidden = act(hidden * _scale(own["deq_scale1"])) * own["scale"]
            hidden = (hidden if get("offset") is None else hidden + own["offset"]).round().clamp(-128, 127)
        else:
            hidden = act(hidden)
        y = _layer(hidden, w2, get("bias2"), get("antiquant_scale2"), get("antiquant_offset2"))
        out[rows] = y if get("deq_scale2") is None else y * _scale(own["deq_scale2"])
    return out.to(output_dtype or (torch.float16 if x.dtype == torch.int8 else x.dtype))


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    wide = weight.float() if offset is None else weight.float() + offset.float()
    y = x.float() @ (wide if scale is None else wide * scale.float())
    return y if bias is None else y + bias.float()


@contextmanager
def installed(more: dict[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """The bodies of this module, and ``more``, for CPU tensors; without torch_npu the committed schemas are defined first."""
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    bodies = {name: body for name, body in globals().items() if name.startswith("npu_")} | (more or {})
    for name, schema in schemas.committed().items():
        if not hasattr(torch.ops.npu, name):
            library.define(schema.removeprefix("npu::"))  # type: ignore[no-untyped-call]
        if name in bodies:
            library.impl(name, bodies[name], "CPU")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
