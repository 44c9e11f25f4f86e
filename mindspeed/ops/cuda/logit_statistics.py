"""`logit_statistics` and `logit_gradient` on CUDA."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.registration import Kernel
from mindspeed.ops.triton import logit_statistics as kernels
from mindspeed.ops.triton.launch import launch, pieces, power, takes, warps

_COLUMNS: Final = 8192
"""Logits that a program sums at once; one that writes gradients, which reads little else, has twice as many per thread."""


def statistics(logits: Tensor, rows: Tensor, with_total: bool, with_expected: bool) -> tuple[Tensor, Tensor]:
    """The largest logits and the sums."""
    logits, (tokens, width) = logits.contiguous(), logits.shape
    largest = logits.new_empty(tokens, dtype=torch.float32)
    sums = largest.new_empty(4, tokens)
    columns = min(power(width), _COLUMNS)
    options = {"TOTAL": with_total, "EXPECTED": with_expected, "COLUMNS": columns, "num_warps": warps(columns)}
    launch(kernels.statistics, tokens, logits, rows.contiguous(), largest, sums, tokens, width, **options)
    return largest, sums


def gradient(
    logits: Tensor, largest: Tensor, log_sums: Tensor, factors: Tensor, rows: Tensor, with_total: bool, with_expected: bool
) -> None:
    """The gradients, in place."""
    tokens, width = logits.shape
    columns = min(power(width), 2 * _COLUMNS)
    across = pieces(width, columns)
    tensors = (logits, *(x.contiguous() for x in (largest, log_sums, factors, rows)))
    options = {"TOTAL": with_total, "EXPECTED": with_expected, "COLUMNS": columns, "num_warps": warps(columns // 2)}
    launch(kernels.gradient, tokens * across, *tensors, tokens, width, across, **options)


KERNELS: Final[dict[str, Kernel]] = {
    "logit_statistics": Kernel(statistics, lambda logits, *rest: takes(logits) and logits.shape[1] > 0),
    "logit_gradient": Kernel(gradient, lambda logits, *rest: takes(logits) and logits.is_contiguous()),
}
