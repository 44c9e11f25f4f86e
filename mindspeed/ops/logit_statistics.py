"""Softmax statistics of the logits of tokens, and the gradients of these logits in place of them.

One pass over a chunk of an output layer's logits gives all that a cross-entropy, a z-loss or an entropy needs. A second one
replaces the logits by their gradients. Sums are fp32, or fp64 for fp64 logits. With the vocabulary divided among ranks, each
has the statistics of its columns. Neither function takes part in autograd: the loss that calls them has the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from mindspeed.ops.errors import require
from mindspeed.ops.numerics import wide, wide_type
from mindspeed.ops.registration import define, like

LOG_SUM: Final = 0
PICKED: Final = 1
TOTAL: Final = 2
EXPECTED: Final = 3
"""Rows of the sums, see `logit_statistics`."""


def logit_statistics(
    logits: Tensor, rows: Tensor, with_total: bool = False, with_expected: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each token [C], and sums over the logits relative to it [4, C].

    ``logits`` is [C, V] of a floating-point type, ``rows`` [C] int64: the column of each token's label, or -1 where it has none
    here. The sums are those of exponentials, the logit of the label itself (0 without one), those of logits, and those of
    logits times their exponentials; the last two are 0 unless asked for. Raises OperatorError for other shapes or types.
    """
    _require("logit_statistics", logits, rows)
    largest, sums = torch.ops.mindspeed.logit_statistics(logits.detach(), rows, with_total, with_expected)
    return largest, sums


def logit_gradient(
    logits: Tensor,
    largest: Tensor,
    log_sums: Tensor,
    factors: Tensor,
    rows: Tensor,
    with_total: bool = False,
    with_expected: bool = False,
) -> None:
    """Replace each logit x by its gradient, from the gradients of its token's statistics.

    With ``z = x - largest`` and ``p = exp(z - log_sums)`` it is ``p factors[LOG_SUM]``, and ``factors[PICKED]`` more at the
    label; ``with_total`` adds ``factors[TOTAL]``, ``with_expected`` adds ``p z factors[EXPECTED]``. ``logits`` is [C, V],
    ``largest`` and ``log_sums`` [C] and ``factors`` [4, C] of the type of sums, ``rows`` as in `logit_statistics`. Rounded
    once. Raises OperatorError for other shapes or types.
    """
    op, count = "logit_gradient", logits.shape[:1]
    _require(op, logits, rows)
    fits = largest.shape == log_sums.shape == count and factors.shape == (4, *count)
    require(fits, op, f"largest and log_sums must be [{count[0]}], and factors [4, {count[0]}]")
    wanted = wide_type(logits.dtype)
    require({largest.dtype, log_sums.dtype, factors.dtype} == {wanted}, op, f"statistics and factors must be {wanted}")
    torch.ops.mindspeed.logit_gradient(logits.detach(), largest, log_sums, factors, rows, with_total, with_expected)


def _require(op: str, logits: Tensor, rows: Tensor) -> None:
    require(logits.is_floating_point() and logits.dim() == 2, op, f"logits of shape {tuple(logits.shape)} must be a matrix")
    fits = rows.dtype == torch.int64 and rows.shape == logits.shape[:1] and rows.device == logits.device
    require(fits, op, f"rows must be one int64 for each token, on {logits.device}")


_BLOCKS: Final = 8
"""Parts of the tokens that the references compute one after the other: what they keep beside the logits is no larger."""


_LEAST: Final = -1e4
"""Exponentials of less are 0, so logits of minus infinity count as this where 0 times infinity would be no number."""


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, -(-len(logits) // _BLOCKS))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _statistics(logits: Tensor, rows: Tensor, with_total: bool, with_expected: bool) -> tuple[Tensor, Tensor]:
    largest, sums = _statistics_shape(logits, rows, with_total, with_expected)
    sums.zero_()
    sums[PICKED] = torch.where(rows < 0, 0, logits.gather(1, rows.clamp_min(0)[:, None])[:, 0])
    for block in _blocks(logits):
        x = wide(logits[block])
        largest[block] = x.amax(-1)
        z = x - largest[block, None]
        if with_total:
            sums[TOTAL, block] = z.sum(-1)
        exponentials = z.exp() if with_expected else z.exp_()
        sums[LOG_SUM, block] = exponentials.sum(-1)
        if with_expected:
            sums[EXPECTED, block] = exponentials.mul_(z.clamp_min_(_LEAST)).sum(-1)
    return largest, sums


def _gradient(
    logits: Tensor, largest: Tensor, log_sums: Tensor, factors: Tensor, rows: Tensor, with_total: bool, with_expected: bool
) -> None:
    for block in _blocks(logits):
        constant, picked, each, slope = factors[:, block, None]
        z = (wide(logits[block]) - largest[block, None]).clamp_min_(_LEAST)
        values = (z - log_sums[block, None]).exp_()
        values.mul_(z.mul_(slope).add_(constant) if with_expected else constant)
        if with_total:
            values.add_(each)
        values.scatter_add_(1, rows[block, None].clamp_min(0), torch.where(rows[block, None] < 0, 0, picked))
        logits[block] = values


def _statistics_shape(logits: Tensor, rows: Tensor, with_total: bool, with_expected: bool) -> tuple[Tensor, Tensor]:
    largest = logits.new_empty(logits.shape[0], dtype=wide_type(logits.dtype))
    return largest, largest.new_empty(4, logits.shape[0])


_OPTIONS: Final = "bool with_total, bool with_expected"
define(f"logit_statistics(Tensor logits, Tensor rows, {_OPTIONS}) -> (Tensor, Tensor)", _statistics, _statistics_shape)
_ARGUMENTS: Final = f"Tensor(a!) logits, Tensor largest, Tensor log_sums, Tensor factors, Tensor rows, {_OPTIONS}"
define(f"logit_gradient({_ARGUMENTS}) -> ()", _gradient, like())
