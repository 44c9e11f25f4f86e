"""SwiGLU by the operator `mindspeed.ops.swiglu`."""

from __future__ import annotations

from torch import Tensor, nn

from mindspeed.ops.swiglu import swiglu


class SwiGLU(nn.GLU):
    """Replaces ``torch.nn.GLU`` with SiLU in the place of the sigmoid: ``y = silu(a) * b`` with ``x = [a | b]``.

    The input is [..., 2 n, ...] of any floating-point type, split along ``dim``, and the output [..., n, ...] of the same
    type. Formula: Shazeer, arXiv 2002.05202. Raises OperatorError for an odd size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Gate the second half of ``x`` with SiLU of the first half."""
        return swiglu(x, self.dim)
