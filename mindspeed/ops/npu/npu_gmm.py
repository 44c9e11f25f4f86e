"""`npu_gmm` by ``npu_grouped_matmul``: rows by group (``group_type`` 0) and, for the weight's gradient, sums by group (2).

The gradient of a bias, which torch_npu has no operator for, runs the reference; so do fp64, a wide bias on fp16, widths of
65536 and more, and more than 1024 groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.npu import TYPES, narrow
from mindspeed.ops.npu_gmm import GROUPED_ROWS, GROUPED_SUM, _forward
from mindspeed.ops.numerics import filled
from mindspeed.ops.registration import Kernel, with_reference

GROUPS: Final = 1024
_MATRICES: Final = 128
"""The longest list of tensors."""
_ENDS, _SIZES, _ONE_RESULT = 0, 1, 3


def kind_of_list(groups: Tensor, cumulative: bool) -> int:
    """Return torch_npu's number for this kind of list; it takes no list of a single size, which is an end as well."""
    return _ENDS if cumulative or groups.shape[0] == 1 else _SIZES


def _supports(x: Tensor, other: Tensor, groups: Tensor) -> bool:
    fits = groups.shape[0] <= GROUPS and narrow(x.shape[1], *other.shape[-2:])
    return x.dtype in TYPES and fits and filled(x, other)


def _supports_forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, cumulative: bool) -> bool:
    exact = bias is None or bias.dtype == x.dtype or x.dtype != torch.float16
    return exact and _supports(x, weight, groups)


def _supports_sum(x: Tensor, dy: Tensor, groups: Tensor, cumulative: bool) -> bool:
    return _supports(x, dy, groups) and narrow(x.shape[0])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, cumulative: bool) -> Tensor:
    kind = torch.float16 if x.dtype == torch.float16 else torch.float32
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        bias=None if bias is None else [bias.to(kind)],
        group_list=groups.to(x.device),
        split_item=_ONE_RESULT,
        group_type=GROUPED_ROWS,
        group_list_type=kind_of_list(groups, cumulative),
    )
    return y  # type: ignore[no-any-return]


def _supports_separate(x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> bool:
    return len(weights) <= _MATRICES and _supports(x, weights[0], groups)


def separate(x: Tensor, weights: Sequence[Tensor], groups: Tensor, cumulative: bool) -> Tensor:
    """The product with a tensor of each group, which is not copied."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        list(weights),
        group_list=groups.to(x.device),
        split_item=_ONE_RESULT,
        group_type=GROUPED_ROWS,
        group_list_type=kind_of_list(groups, cumulative),
    )
    return y  # type: ignore[no-any-return]


def grouped_sum(x: Tensor, dy: Tensor, groups: Tensor, cumulative: bool) -> Tensor:
    """``x_e^T dy_e`` of each group."""
    (dweight,) = torch.ops.npu.npu_grouped_matmul(
        [x.t()],
        [dy],
        group_list=groups.to(x.device),
        split_item=_ONE_RESULT,
        group_type=GROUPED_SUM,
        group_list_type=kind_of_list(groups, cumulative),
    )
    return dweight  # type: ignore[no-any-return]


def by_expert(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[E, rows, K] by [E, K, N], plus bias [E, 1, N]: equally many rows per group."""
    experts, rows, _ = x.shape
    sizes = torch.full((experts,), rows, dtype=torch.int64, device=x.device)
    flat = None if bias is None else bias[:, 0]
    y: Tensor = _PRODUCT(x.flatten(0, 1), weight, flat, sizes, False)
    return y.view(experts, rows, weight.shape[2])


KERNELS: Final[dict[str, Kernel]] = {
    "npu_gmm": Kernel(forward, _supports_forward),
    "npu_gmm_separate": Kernel(separate, _supports_separate),
    "npu_gmm_sum": Kernel(grouped_sum, _supports_sum),
}
_PRODUCT: Final = with_reference(KERNELS["npu_gmm"], _forward)
