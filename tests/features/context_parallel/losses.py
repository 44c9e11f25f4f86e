"""What the tests of the loss rule run on every rank: steps of a tiny model with a loss function of their own."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed.engine.runtime import session
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.verification.model import build_chunks
from mindspeed.workbench.verification.shape import Recipe
from mindspeed.workbench.verification.training import micro_batches


def two_values(labels: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def three_values(labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Only some labels count, so ranks hold different numbers of tokens that do."""
    counts = labels % 3 == 0
    total = (losses.float() * counts).sum()
    return total, counts.sum().int(), {"loss": total.detach()}


def mean_of_some(labels: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What three values mean in one process."""
    total, number, report = three_values(labels, losses)
    return total / number, report


def share_of_two_values(labels: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What Megatron expects of two values: this rank's sum over the number of all ranks of the sequence."""
    total, number, report = three_values(labels, losses)
    dist.all_reduce(number, group=parallel_state.get_context_parallel_group())
    return total / number, report


LOSSES = {function.__name__: function for function in (two_values, three_values, mean_of_some, share_of_two_values)}


def steps(recipe: Recipe, loss: str, count: int) -> tuple[list[str], str, list[float]]:
    """What was said, the error that ended it, and the norm of all gradients of each step."""
    said: list[str] = []
    norms: list[float] = []
    active = session.current()
    assert active is not None
    active.proof.say = said.append
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    chunks = build_chunks(recipe)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    ranks = parallel_state.get_data_parallel_world_size()

    def forward(step: int, batches: Any, chunk: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        return chunk(batch.tokens, batch.positions, batch.mask, labels=batch.labels), partial(LOSSES[loss], batch.labels)

    try:
        for step in range(count):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=partial(forward, step),
                data_iterator=[micro_batches(recipe, step, parallel_state.get_data_parallel_rank(), ranks) for _ in chunks],
                model=chunks,
                num_microbatches=recipe.global_batch_size // ranks,
                seq_length=recipe.shape.seq_length,
                micro_batch_size=recipe.micro_batch_size,
                forward_only=False,
            )
            norms.append(float(torch.stack([p.main_grad.norm() for chunk in chunks for p in chunk.parameters()]).norm()))
    except MindSpeedError as error:
        return said, str(error), norms
    finally:
        active.proof.say = None  # a strict plan would judge the steps that were not made
    return said, "", norms
