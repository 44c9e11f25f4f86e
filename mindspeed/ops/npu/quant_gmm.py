"""`quant_gmm` by ``npu_grouped_matmul`` with ``scale`` and ``per_token_scale``, for the pairs of types that it documents.

Those are: int8 results of int64 scales, bf16 of bf16, fp16 of fp32; an activation only with ``per_token_scale``.
Others run the reference.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mindspeed.ops.npu import narrow
from mindspeed.ops.npu.npu_gmm import GROUPS, kind_of_list
from mindspeed.ops.npu_gmm import GROUPED_ROWS
from mindspeed.ops.numerics import filled
from mindspeed.ops.quant_gmm import QuantizedProduct
from mindspeed.ops.registration import Kernel

_SCALES: Final = {torch.int8: torch.int64, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
_ONE_RESULT: Final = 3


def _supports(*args: Any) -> bool:
    x, weight, scale, per_token, _, groups, dtype, activation, _ = QuantizedProduct(*args)
    scaled = scale.dtype == _SCALES[dtype] and (activation == 0 or per_token is not None)
    return scaled and groups.shape[0] <= GROUPS and narrow(x.shape[1], weight.shape[2]) and filled(x, weight)


def forward(*args: Any) -> Tensor:
    x, weight, scale, per_token, bias, groups, dtype, activation, cumulative = QuantizedProduct(*args)
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        bias=None if bias is None else [bias],
        scale=[scale],
        per_token_scale=None if per_token is None else [per_token],
        group_list=groups.to(x.device),
        split_item=_ONE_RESULT,
        group_type=GROUPED_ROWS,
        group_list_type=kind_of_list(groups, cumulative),
        act_type=activation,
        output_dtype=None if dtype == torch.int8 else dtype,
    )
    return y  # type: ignore[no-any-return]


KERNELS: Final[dict[str, Kernel]] = {"quant_gmm": Kernel(forward, _supports)}
