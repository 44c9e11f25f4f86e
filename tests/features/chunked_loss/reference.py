"""The loss of the library by its definition, from all logits: what the chunks are compared with."""

import torch
from torch import Tensor


def logits_of(hidden: Tensor, weight_VH: Tensor) -> Tensor:
    logits = hidden @ weight_VH.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(
    hidden: Tensor, weight_VH: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy with the mass of the smoothing on all labels but the right one; -100 is ignored."""
    logits = logits_of(hidden, weight_VH)
    vocabulary = len(weight_VH)
    target = torch.full_like(logits, label_smoothing / (vocabulary - 1))
    target.scatter_(-1, labels.clamp_min(0)[..., None], 1 - label_smoothing)
    loss = -(target * logits.log_softmax(-1)).sum(-1) + z_loss * logits.logsumexp(-1) ** 2
    return torch.where(labels == -100, 0, loss)


def log_probabilities(hidden: Tensor, weight_VH: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The formulas of verl (logprobs_from_logits, entropy_from_logits) on all logits."""
    logits = logits_of(hidden / temperature, weight_VH)
    log = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return torch.where(labels == -100, 0, log), entropy
