"""The model's side: an output layer that defers its logits to the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.chunked_loss.linear_cross_entropy import linear_cross_entropy
from mindspeed.tensor_parallel.linear import plain_weight_gradient
from mindspeed.tensor_parallel.weight_gradient import weight_gradient

_LABELS = 4
"""Place of the labels among the arguments of a model."""


@dataclass(slots=True)
class DeferredLogits:
    """The input and the weight of an output layer, from which the loss computes logits.

    ``hidden`` is [S, B, H], a share of the sequence under sequence parallelism, ``weight`` is [V, H]. The ``loss_mask`` [B, S]
    has the weights of the tokens in the loss. The loss sets ``is_largest`` [B, S]: whether no logit is larger than the label's.
    """

    layer: Any
    hidden: Tensor
    weight: Tensor
    loss_mask: Tensor | None
    is_largest: Tensor | None = None

    def __mul__(self, factor: float) -> DeferredLogits:
        """Return the logits times a number, by which muP scales them."""
        return replace(self, hidden=self.hidden * factor)

    def loss(self, labels_BS: Tensor, args: Any) -> Tensor:
        """Return the loss of each token [B, S]."""
        recomputes = args.mode == "recompute"
        is_largest_SB = torch.empty_like(labels_BS.t(), dtype=torch.bool) if recomputes else None
        gradient = weight_gradient(self.weight, self.layer.gradient_accumulation_fusion)
        loss_SB = linear_cross_entropy(
            self.hidden,
            self.weight,
            labels_BS.t().contiguous(),
            group=self.layer.tp_group,
            sequence_parallel=self.layer.sequence_parallel,
            chunks=args.chunks_of(labels_BS.numel()),
            mode=args.mode,
            ignore_index=None,
            token_weights=None if self.loss_mask is None else self.loss_mask.t(),
            weight_gradient=None if gradient is plain_weight_gradient else gradient,
            is_largest=is_largest_SB,
        )
        self.is_largest = None if is_largest_SB is None else is_largest_SB.t()
        return loss_SB.t().contiguous()


def with_deferred_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the forward pass of a model: where it computes a loss, its output layer returns `DeferredLogits`."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", args[_LABELS] if len(args) > _LABELS else None)
        if labels is None or not self.post_process or kwargs.get("output_processor") is not None:
            return original(self, *args, **kwargs)
        with _deferred(self.output_layer, kwargs.get("loss_mask")):
            return original(self, *args, **kwargs)

    return forward


@contextmanager
def _deferred(layer: Any, loss_mask_BS: Tensor | None) -> Iterator[None]:
    """Defer the logits of a layer within a with-block. Hooks of the module run as usual."""

    def forward(input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[DeferredLogits, None]:
        return DeferredLogits(layer, input_, layer.weight if weight is None else weight, loss_mask_BS), None

    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def with_chunked_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Around the loss of a model: deferred logits are computed in chunks."""

    @functools.wraps(original)
    def loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return original(self, labels, logits)
        return logits.loss(labels, ms.active_feature("chunked-loss").args)

    return loss


def with_predictions_of_loss(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Around the counts of predicted and of all tokens of a depth: those of deferred logits are what their loss has found."""

    @functools.wraps(original)
    def counts(mtp_logits: Any, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(mtp_logits, DeferredLogits) or mtp_logits.is_largest is None:
            return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        is_valid = loss_mask.bool()
        return (mtp_logits.is_largest & is_valid).sum().float(), is_valid.sum().float()

    return counts
