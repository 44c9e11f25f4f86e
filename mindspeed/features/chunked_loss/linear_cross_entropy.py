"""Cross-entropy, log-probabilities and entropy of an output layer, in chunks of tokens. Plain torch, usable alone.

The logits of all tokens never exist at once. With a process group each rank has an equal share of the rows of the output
weight, and with sequence parallelism an equal share of the tokens too.

T tokens, R of them on this rank under sequence parallelism (else R = T), C tokens of a chunk, H hidden size, V rows of the
output weight on this rank. Softmax and sums are computed in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features.chunked_loss.chunks import default_chunks
from mindspeed.ops.logit_statistics import EXPECTED, LOG_SUM, PICKED, TOTAL, logit_gradient, logit_statistics
from mindspeed.ops.npu_matmul_add_fp32 import npu_matmul_add_fp32
from mindspeed.ops.numerics import wide_type

Mode: TypeAlias = Literal["recompute", "accumulate"]
"""*recompute* computes the logits of a chunk again in backward. *accumulate* computes gradients in forward."""

WeightGradient: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]
"""Adds the gradient of a chunk to a buffer, from the gradient of its logits [C, V] and its hidden states [C, H]. Returns what
autograd gets as the gradient of the weight."""

_PROPORTIONAL: Final = 1e-6
"""Largest deviation of loss gradients from a multiple of the token weights, relative to the largest gradient."""

_OTHER_GRADIENTS: Final = (
    "the gradients of token losses are no multiple of token_weights, so backward computes the logits again for the gradient of "
    'the weight. Give the weights of the loss as token_weights, or set mode="recompute"'
)


@dataclass(frozen=True, slots=True)
class _Options:
    """The constants of one call.

    ``group`` has more than one rank. ``chunk`` is in tokens, ``rows`` and ``vocabulary`` count rows of the output weight on
    this rank and on all. ``has_total`` and ``has_expected`` select statistics.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    chunk: int
    rows: int
    first_row: int
    vocabulary: int
    weight_gradient: WeightGradient | None = None
    has_total: bool = False
    has_expected: bool = False

    def spans(self, tokens: int) -> Iterator[slice]:
        """Yield the chunks of the tokens."""
        return (slice(start, min(start + self.chunk, tokens)) for start in range(0, tokens, self.chunk))

    def gather(self, hidden_RH: Tensor) -> Tensor:
        """Return the hidden states of all tokens."""
        if self.group is None or not self.sequence_parallel:
            return hidden_RH
        hidden_TH = hidden_RH.new_empty((len(hidden_RH) * self.group.size(), hidden_RH.shape[1]))
        dist.all_gather_into_tensor(hidden_TH, hidden_RH.contiguous(), group=self.group)
        return hidden_TH

    def reduce(self, grad_TH: Tensor) -> Tensor:
        """Return the gradients of this rank's hidden states, from those that each rank computed with its rows."""
        if self.group is None:
            return grad_TH
        if not self.sequence_parallel:
            dist.all_reduce(grad_TH, group=self.group)
            return grad_TH
        grad_RH = grad_TH.new_empty((len(grad_TH) // self.group.size(), grad_TH.shape[1]))
        dist.reduce_scatter_tensor(grad_RH, grad_TH, group=self.group)
        return grad_RH

    def local_tokens(self, values_T: Tensor) -> Tensor:
        """Return the values of those tokens whose hidden states this rank has."""
        if self.group is None or not self.sequence_parallel:
            return values_T
        count = len(values_T) // self.group.size()
        return values_T[self.group.rank() * count :][:count]

    def is_known(self, labels_T: Tensor) -> Tensor:
        """Return whether labels are in the vocabulary."""
        return (labels_T >= 0) & (labels_T < self.vocabulary)

    def positions(self, labels_T: Tensor) -> Tensor:
        """Return the rows of labels in this rank's share of the weight, -1 for those that it does not have."""
        rows_T = labels_T - self.first_row
        return torch.where((rows_T >= 0) & (rows_T < self.rows), rows_T, -1)

    def sums(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of this rank's rows [C] and the sums over them [4, C]."""
        return logit_statistics(logits_CV, self.positions(labels_C), self.has_total, self.has_expected)

    def to_gradients(self, logits_CV: Tensor, largest_C: Tensor, log_C: Tensor, factors_4C: Tensor, labels_C: Tensor) -> Tensor:
        """Replace logits by their gradients, and return these."""
        rows_C = self.positions(labels_C)
        logit_gradient(logits_CV, largest_C, log_C, factors_4C, rows_C, self.has_total, self.has_expected)
        return logits_CV


def linear_cross_entropy(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunks: int | None = None,
    mode: Mode = "recompute",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    weight_gradient: WeightGradient | None = None,
    is_largest: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of each label, in the shape of ``labels``, without the logits of all tokens.

    ``hidden`` is [..., H] with the leading sizes of ``labels``; under sequence parallelism its first dimension is this rank's
    share. Tokens with the label ``ignore_index`` have loss and gradients of 0. The probability of any other label that is not
    in the vocabulary counts as that of the most probable one, as in Megatron. ``label_smoothing`` gives this probability mass
    to the other labels, ``z_loss`` times the squared log-sum of the exponentials of a token's logits is added to its loss.

    With ``mode="accumulate"`` the weight's gradient is summed in forward, which needs the gradient of each token's loss
    except for a common factor: ``token_weights``, 1 if not given. Backward computes logits again where it gets others.

    In recompute mode ``weight_gradient`` adds the weight's gradient to a buffer, and ``is_largest``, a tensor of bools in the
    shape of ``labels``, is set to whether no logit of the token is larger than that of its label.
    """
    options = _options_of(hidden, weight_VH, labels, group, sequence_parallel, chunks)
    options = replace(options, has_total=label_smoothing > 0)
    hidden_RH, labels_T = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    loss = _Loss(options.vocabulary, ignore_index, label_smoothing, z_loss)
    if mode == "accumulate" and torch.is_grad_enabled():
        weights_T = None if token_weights is None else token_weights.detach().reshape(-1)
        result_T: Tensor = _Accumulated.apply(hidden_RH, weight_VH, labels_T, weights_T, options, loss)  # type: ignore[no-untyped-call]
    else:
        options = replace(options, weight_gradient=weight_gradient)
        statistics_4T, largest_T = _Statistics.apply(hidden_RH, weight_VH, labels_T, options)  # type: ignore[no-untyped-call]
        result_T = loss.of(statistics_4T, largest_T, labels_T)
        if is_largest is not None:
            is_largest.copy_((options.is_known(labels_T) & (statistics_4T[PICKED] == 0)).view(labels.shape))
    return result_T.view(labels.shape)


def token_log_probabilities(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunks: int | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label and the entropy of each token's distribution, in the shape of ``labels``.

    Both have gradients, which are computed in chunks too. The entropy is None without ``with_entropy``, because it needs a
    second buffer of the size of a chunk's logits. Logits are divided by ``temperature``; the other arguments are those of
    `linear_cross_entropy`.
    """
    options = _options_of(hidden, weight_VH, labels, group, sequence_parallel, chunks)
    options = replace(options, has_expected=with_entropy)
    hidden_RH, labels_T = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if temperature != 1:
        hidden_RH = hidden_RH / temperature
    statistics_4T, _ = _Statistics.apply(hidden_RH, weight_VH, labels_T, options)  # type: ignore[no-untyped-call]
    log_T = statistics_4T[PICKED] - statistics_4T[LOG_SUM]
    if ignore_index is not None:
        log_T = torch.where(labels_T == ignore_index, 0, log_T)
    if not with_entropy:
        return log_T.view(labels.shape), None
    entropy_T = statistics_4T[LOG_SUM] - statistics_4T[EXPECTED]
    return log_T.view(labels.shape), entropy_T.view(labels.shape)


def _options_of(
    hidden: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    chunks: int | None,
) -> _Options:
    rows, width = weight_VH.shape
    if group is not None and group.size() == 1:
        group = None
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if hidden.shape[-1] != width or hidden[..., 0].numel() * (ranks if sequence_parallel else 1) != labels.numel():
        sizes = f"hidden states {tuple(hidden.shape)}, weight {tuple(weight_VH.shape)} and labels {tuple(labels.shape)}"
        raise ValueError(f"{sizes} do not fit together")
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks is {chunks}, but it must be at least 1")
    chunk = max(1, -(-labels.numel() // (chunks or default_chunks(rows, width))))
    return _Options(group, sequence_parallel, chunk, rows, rank * rows, ranks * rows)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a token as a function of its statistics."""

    vocabulary: int
    ignore_index: int | None
    label_smoothing: float
    z_loss: float

    @property
    def smoothing(self) -> float:
        """Weight of the mean over the vocabulary, with the label in it. Formula: NeMo's smoothed cross-entropy."""
        return self.label_smoothing * self.vocabulary / max(self.vocabulary - 1, 1)

    def of(self, statistics_4T: Tensor, largest_T: Tensor, labels_T: Tensor) -> Tensor:
        """Return the loss of each token."""
        loss_T = statistics_4T[LOG_SUM] - (1 - self.smoothing) * statistics_4T[PICKED]
        if self.smoothing:
            loss_T = loss_T - self.smoothing / self.vocabulary * statistics_4T[TOTAL]
        if self.z_loss:
            loss_T = loss_T + self.z_loss * (statistics_4T[LOG_SUM] + largest_T).square()
        return loss_T if self.ignore_index is None else torch.where(labels_T == self.ignore_index, 0, loss_T)

    def with_gradient(self, statistics_4T: Tensor, largest_T: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and its gradient with respect to the statistics [4, T]."""
        with torch.enable_grad():
            leaf_4T = statistics_4T.detach().requires_grad_()
            loss_T = self.of(leaf_4T, largest_T, labels_T)
            (grad_4T,) = torch.autograd.grad(loss_T.sum(), leaf_4T)
        return loss_T.detach(), grad_4T


class _Statistics(torch.autograd.Function):
    """Statistics of each token's logits [4, T], relative to the largest logit of the token, which is a constant [T].

    These are the logarithm of the sum of exponentials, the logit of the label, the sum of logits, and their expected value.
    """

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, labels_T: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        hidden_TH = options.gather(hidden_RH)
        largest_T = hidden_RH.new_empty(len(labels_T), dtype=wide_type(hidden_RH.dtype))
        sums_4T = largest_T.new_empty(4, len(labels_T))
        for span in options.spans(len(labels_T)):
            largest_T[span], sums_4T[:, span] = options.sums(hidden_TH[span].mm(weight_VH.t()), labels_T[span])
        statistics_4T, largest_T = _combined(largest_T, sums_4T, labels_T, options)
        ctx.options = options
        log_T, expected_T = statistics_4T[LOG_SUM].clone(), statistics_4T[EXPECTED].clone() if options.has_expected else None
        ctx.save_for_backward(hidden_RH, weight_VH, labels_T, largest_T, log_T, expected_T)
        ctx.mark_non_differentiable(largest_T)
        return statistics_4T, largest_T

    @staticmethod
    def backward(ctx: Any, grad_4T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, labels_T, largest_T, log_T, expected_T = ctx.saved_tensors
        options: _Options = ctx.options
        hidden_TH = options.gather(hidden_RH)
        gradients = _Gradients(hidden_TH, weight_VH, ctx.needs_input_grad, options)
        if expected_T is not None:
            grad_4T = grad_4T.clone()
            grad_4T[LOG_SUM] += grad_4T[EXPECTED] * (1 - expected_T)
        for span in options.spans(len(labels_T)):
            logits_CV = hidden_TH[span].mm(weight_VH.t())
            gradients.add(span, options.to_gradients(logits_CV, largest_T[span], log_T[span], grad_4T[:, span], labels_T[span]))
            del logits_CV  # before the next chunk's are made
        return gradients.hidden(), gradients.weight(), None, None


class _Accumulated(torch.autograd.Function):
    """The loss of each token [T], with gradients that are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        options: _Options,
        loss: _Loss,
    ) -> Tensor:
        hidden_TH = options.gather(hidden_RH)
        loss_T = hidden_RH.new_empty(len(labels_T), dtype=wide_type(hidden_RH.dtype))
        gradients = _Gradients(hidden_TH, weight_VH, ctx.needs_input_grad, options)
        for span in options.spans(len(labels_T)):
            logits_CV = hidden_TH[span].mm(weight_VH.t())
            statistics_4C, largest_C = _combined(*options.sums(logits_CV, labels_T[span]), labels_T[span], options)
            loss_T[span], grad_4C = loss.with_gradient(statistics_4C, largest_C, labels_T[span])
            options.to_gradients(logits_CV, largest_C, statistics_4C[LOG_SUM], grad_4C, labels_T[span])
            gradients.add(span, logits_CV, None if weights_T is None else weights_T[span])
            del logits_CV  # before the next chunk's are made
        ctx.options, ctx.loss = options, loss
        ctx.save_for_backward(hidden_RH, weight_VH, labels_T, weights_T, gradients.hidden(), gradients.weight())
        return loss_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, labels_T, weights_T, grad_RH, grad_VH = ctx.saved_tensors
        options: _Options = ctx.options
        if grad_RH is not None:
            grad_RH = (grad_RH * options.local_tokens(grad_T)[:, None]).to(grad_RH.dtype)
        if grad_VH is not None:
            factor = _common_factor(grad_T, torch.ones_like(grad_T) if weights_T is None else weights_T.to(grad_T.dtype))
            if factor is not None:
                grad_VH = (grad_VH * factor[None]).to(grad_VH.dtype)
            else:
                warnings.warn(_OTHER_GRADIENTS, stacklevel=1)
                with torch.enable_grad():
                    leaf_VH = weight_VH.detach().requires_grad_()
                    statistics_4T, largest_T = _Statistics.apply(hidden_RH, leaf_VH, labels_T, options)  # type: ignore[no-untyped-call]
                    loss_T = ctx.loss.of(statistics_4T, largest_T, labels_T)
                (grad_VH,) = torch.autograd.grad(loss_T, leaf_VH, grad_T)
        return grad_RH, grad_VH, None, None, None, None


class _Gradients:
    """The gradients of hidden states and weight, summed over chunks. Those that are not needed are None."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, needed: Sequence[bool], options: _Options) -> None:
        self._options = options
        self._hidden_TH, self._weight_VH = hidden_TH, weight_VH
        self._grad_TH = torch.empty_like(hidden_TH) if needed[0] else None
        self._needs_weight = needed[1]
        self._grad_VH: Tensor | None = None

    def add(self, span: slice, gradient_CV: Tensor, weights_C: Tensor | None = None) -> None:
        """Add a chunk, whose tokens count ``weights_C`` times for the weight, from the gradients of its logits."""
        if self._grad_TH is not None:
            torch.mm(gradient_CV, self._weight_VH, out=self._grad_TH[span])
        if not self._needs_weight:
            return
        hidden_CH = self._hidden_TH[span]
        if weights_C is not None:
            hidden_CH = (hidden_CH * weights_C[:, None]).to(hidden_CH.dtype)
        if self._options.weight_gradient is not None:
            self._grad_VH = self._options.weight_gradient(gradient_CV, hidden_CH)
        elif len(hidden_CH) == len(self._hidden_TH):
            self._grad_VH = gradient_CV.t().mm(hidden_CH)
        else:
            if self._grad_VH is None:
                self._grad_VH = torch.zeros_like(self._weight_VH, dtype=wide_type(self._weight_VH.dtype))
            if self._grad_VH.dtype == gradient_CV.dtype:
                self._grad_VH.addmm_(gradient_CV.t(), hidden_CH)
            else:
                npu_matmul_add_fp32(hidden_CH, gradient_CV, self._grad_VH)

    def hidden(self) -> Tensor | None:
        """Return the gradient of this rank's hidden states [R, H], summed over ranks."""
        return None if self._grad_TH is None else self._options.reduce(self._grad_TH)

    def weight(self) -> Tensor | None:
        """Return the gradient of the weight [V, H], or None where it was added to a buffer."""
        if self._grad_VH is None:
            return torch.zeros_like(self._weight_VH) if self._needs_weight and not len(self._hidden_TH) else None
        return self._grad_VH.to(self._weight_VH.dtype)


def _combined(local_T: Tensor, sums_4T: Tensor, labels_T: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Return the statistics over all ranks [4, T], relative to the largest logits [T], from the sums of each rank."""
    largest_T = local_T
    if options.group is not None:
        largest_T = local_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=options.group)
        shift_T = local_T - largest_T
        if options.has_total:
            sums_4T[TOTAL] += options.rows * shift_T
        if options.has_expected:
            sums_4T[EXPECTED] += shift_T * sums_4T[LOG_SUM]
        sums_4T[[LOG_SUM, EXPECTED]] *= shift_T.exp_()
        dist.all_reduce(sums_4T, group=options.group)
    statistics_4T = torch.empty_like(sums_4T)
    statistics_4T[LOG_SUM] = sums_4T[LOG_SUM].log()
    statistics_4T[PICKED] = torch.where(options.is_known(labels_T), sums_4T[PICKED] - largest_T, 0)
    statistics_4T[TOTAL] = sums_4T[TOTAL]
    statistics_4T[EXPECTED] = sums_4T[EXPECTED] / sums_4T[LOG_SUM]
    return statistics_4T, largest_T


def _common_factor(grad_T: Tensor, weights_T: Tensor) -> Tensor | None:
    """Return the number by which gradients are multiples of weights, or None where they are not."""
    factor = (grad_T * weights_T).sum() / weights_T.square().sum().clamp_min(torch.finfo(weights_T.dtype).tiny)
    deviation = (grad_T - factor * weights_T).abs()
    if not len(grad_T) or bool((deviation <= _PROPORTIONAL * grad_T.abs().max()).all()):
        return factor
    return None
