"""Rotary position embedding by the operator `mindspeed.ops.npu_rotary_position_embedding`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mindspeed.ops.errors import refuse
from mindspeed.ops.npu_rotary_position_embedding import HALF, INTERLEAVED, npu_rotary_position_embedding


class RotaryEmbedding(nn.Module):
    """Rotates pairs of each head by the angle ``position * base^(-2 i / dim)`` (Su et al., arXiv 2104.09864).

    Pairs are the elements i and i + dim / 2, as in LLaMA's checkpoints of Hugging Face, or neighbours with ``interleaved``.
    The tables for ``max_positions`` are fp32 buffers that a state dict leaves out; they remain fp32 when the module is moved to
    another type.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 4096,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, base, interleaved
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_positions, dim, dtype=torch.float32, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, on the device where they are."""
        device = self.cos.device
        powers = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        angles = torch.outer(torch.arange(len(self.cos), device=device), self.base**-powers)
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate ``x`` [batch, tokens, heads, dim] of any floating-point type; the output is like it.

        ``positions`` [tokens] or [batch, tokens] are the places of the tokens in their sequences, by default 0, 1, 2 ... Under
        context parallelism pass those of this rank. Raises OperatorError for a sequence longer than the tables.
        """
        if positions is None:
            if x.shape[1] > len(self.cos):
                refuse(
                    f"RotaryEmbedding: the sequence has {x.shape[1]} tokens, but max_positions is {len(self.cos)}",
                    f"RotaryEmbedding(..., max_positions={x.shape[1]})",
                )
            tables = self.cos[None, : x.shape[1], None], self.sin[None, : x.shape[1], None]
        else:
            chosen = positions if positions.dim() == 2 else positions[None]
            tables = self.cos[chosen].unsqueeze(2), self.sin[chosen].unsqueeze(2)
        return npu_rotary_position_embedding(x, *tables, INTERLEAVED if self.interleaved else HALF)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_positions={len(self.cos)}, base={self.base}, interleaved={self.interleaved}"
