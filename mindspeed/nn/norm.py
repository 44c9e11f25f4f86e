"""RMSNorm by the operator `mindspeed.ops.rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mindspeed.ops.rms_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """Replaces ``torch.nn.RMSNorm``: its arguments, its parameter ``weight``, its formula.

    ``y = x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, arXiv 1910.07467), summed in fp32 and rounded once. The
    input is [..., *normalized_shape] of any floating-point type, and the output is like it. A weight of another type than the
    input is accepted under autocast alone; the output then has the wider type. Raises OperatorError for other shapes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the trailing dimensions of ``x``."""
        if self.weight is None:
            return super().forward(x)
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)
