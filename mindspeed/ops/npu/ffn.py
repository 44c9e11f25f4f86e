"""`ffn` by ``npu_ffn``: plain, int8 and int8 weights, with and without experts.

What ``npu_ffn`` does not document runs the reference: gated activations in full precision, fp32 and fp64, an output of
another width than the input, a bias of another type, int8 results scaled by other types, and scales by group of rows.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.activations import GATED
from mindspeed.ops.ffn import Quantization
from mindspeed.ops.npu import HALVES, narrow
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel

_BIASES: Final = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.int8: torch.int32}
_SCALES: Final = {torch.float16: (torch.int64, torch.float32), torch.bfloat16: (torch.bfloat16,)}
_FULL_PRECISION: Final = 0


def _supports(x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None, *rest: Any) -> bool:
    biases, how, (name, _, _, dtype) = [bias1, bias2], Quantization(*rest[:8]), rest[8:]
    square = weight2.shape[-1] == x.shape[-1] and narrow(x.shape[-1], weight2.shape[-2])
    if name in GATED or not square or not filled(x, weight1, weight2) or not 2 <= x.dim() <= 8:
        return False
    if x.dtype not in _BIASES or any(bias is not None and bias.dtype != _BIASES[x.dtype] for bias in biases):
        return False
    if x.dtype == torch.int8:
        kinds = {scale.dtype for scale in (how.deq_scale1, how.deq_scale2) if scale is not None}
        shared = [scale for scale in (how.scale, how.offset) if scale is not None]
        one = len(kinds) == 1 and kinds <= set(_SCALES.get(dtype, ()))
        return one and all(scale.dtype == torch.float32 for scale in shared)
    scales = [scale for scale in how[4:] if scale is not None]
    by_channel = all(scale.dtype == x.dtype and scale.dim() == weight1.dim() - 1 for scale in scales)
    return x.dtype in HALVES and dtype == x.dtype and by_channel


def forward(x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None, *rest: Any) -> Tensor:
    how, (name, groups, cumulative, dtype) = Quantization(*rest[:8]), rest[8:]
    y: Tensor = torch.ops.npu.npu_ffn(
        x,
        weight1,
        weight2,
        name,
        expert_tokens=None if cumulative else groups,
        expert_tokens_index=groups if cumulative else None,
        bias1=bias1,
        bias2=bias2,
        scale=how.scale,
        offset=how.offset,
        deq_scale1=how.deq_scale1,
        deq_scale2=how.deq_scale2,
        antiquant_scale1=how.antiquant_scale1,
        antiquant_scale2=how.antiquant_scale2,
        antiquant_offset1=how.antiquant_offset1,
        antiquant_offset2=how.antiquant_offset2,
        inner_precise=_FULL_PRECISION,
        output_dtype=dtype if x.dtype == torch.int8 else None,
    )
    return y


KERNELS: Final[dict[str, Kernel]] = {"ffn": Kernel(forward, _supports)}
