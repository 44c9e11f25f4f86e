"""Cross-entropy of an output layer by `linear_cross_entropy`: the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from mindspeed.features.chunked_loss.linear_cross_entropy import Mode, linear_cross_entropy
from mindspeed.nn.mesh import Mesh, group_of, share_of
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import refuse
from mindspeed.ops.process_groups import group_of_name, name_of

Reduction: TypeAlias = Literal["none", "mean", "sum"]


class LinearCrossEntropyLoss(nn.Module):
    """Replaces ``torch.nn.Linear(bias=False)`` with ``torch.nn.CrossEntropyLoss``, and torch's module of the same name.

    ``linear.weight`` is [num_classes, in_features], or with ``mesh`` this rank's equal share of the rows; tie it to an
    embedding by assignment. The formula is that of ``CrossEntropyLoss`` with class indices, ``label_smoothing`` included;
    ``z_loss`` times the squared log-sum of a token's exponentials is added. Sums are fp32, or fp64 for fp64 inputs.

    ``chunks`` of tokens are computed one after the other, by default so many that the logits of one are not larger than the
    hidden states. ``mode="accumulate"`` computes gradients in forward, where "recompute" computes logits again in backward.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunks: int | None = None,
        mode: Mode = "recompute",
        mesh: Mesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            refuse(f"LinearCrossEntropyLoss: no reduction {reduction!r}", "use none, mean or sum")
        group = None if mesh is None else group_of(mesh, "LinearCrossEntropyLoss")
        ranks = 1 if group is None else group.size()
        rows = share_of(num_classes, ranks, "LinearCrossEntropyLoss", "classes")
        self.num_classes, self.reduction, self.ignore_index = num_classes, reduction, ignore_index
        self.label_smoothing, self.z_loss, self.chunks, self.mode = label_smoothing, z_loss, chunks, mode
        self.linear = nn.Linear(in_features, rows, bias=False, device=device, dtype=dtype)
        self._group = None if group is None else name_of("LinearCrossEntropyLoss", group)

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does."""
        self.linear.reset_parameters()

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the loss of ``target`` [...] (int64) from ``hidden`` [..., in_features] of the type of the weight.

        A number, or [...] without reduction. Targets of ``ignore_index`` do not count. Under autocast both are converted to its
        type. Raises ValueError for shapes that do not fit together.
        """
        share = (self.num_classes - 1) / self.num_classes  # the other labels' share of torch's uniform smoothing
        settings: dict[str, Any] = {
            "group": None if self._group is None else group_of_name(self._group),
            "chunks": self.chunks,
            "mode": self.mode,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing * share,
            "z_loss": self.z_loss,
        }
        loss = _loss(hidden, self.linear.weight, target, settings)
        if self.reduction == "none":
            return loss
        return loss.sum() if self.reduction == "sum" else loss.sum() / (target != self.ignore_index).sum()

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, chunks={self.chunks}, mode={self.mode!r}"


@in_autocast_type("hidden", "weight")
def _loss(hidden: Tensor, weight: Tensor, target: Tensor, settings: dict[str, Any]) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, **settings)
