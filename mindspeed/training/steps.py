"""Run a pass of Megatron's schedule: a training step, and the same forward without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from mindspeed.training.batches import Batch, Batches


def run_schedule(chunks: list[Any], batches: Batches, first: int, forward_only: bool = False) -> torch.Tensor | None:
    """Forward, and backward unless ``forward_only``, of the global batch that begins with sample ``first``.

    Returns the mean loss of this rank's micro-batches (a scalar tensor on the device) on the last stage, else None.
    """
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=batches.of_step(first, chunks),
        model=chunks,
        num_microbatches=batches.count,
        seq_length=batches.dataset.config.sequence_length,
        micro_batch_size=batches.micro_batch_size,
        forward_only=forward_only,
    )
    return torch.stack(losses).mean() if losses else None


def over_ranks(loss: torch.Tensor | None, flag: bool = False) -> tuple[float, bool]:
    """The loss averaged over the ranks that have one, and whether any rank raised ``flag``; collective, equal everywhere."""
    values = torch.zeros(3, dtype=torch.float32, device=torch.cuda.current_device())
    if loss is not None:
        values[0], values[1] = loss, 1.0
    values[2] = float(flag)
    dist.all_reduce(values)
    total, ranks, flags = values.tolist()
    return total / ranks, flags > 0


def _forward(batches: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    loss = _loss_per_token if get_model_config(chunk).calculate_per_token_loss else _mean_loss
    return chunk(batch.tokens, batch.positions, batch.mask, labels=batch.labels), loss


def _loss_per_token(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum and number of tokens, which Megatron divides over all ranks, and this rank's mean."""
    losses = losses_BS.float()
    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device), losses.detach().mean()


def _mean_loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses_BS.float().mean()
    return loss, loss.detach().clone()  # Megatron divides the first in place by the number of micro-batches
