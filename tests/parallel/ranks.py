"""What the tests of `mindspeed.parallel` run on every rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed.ops.errors import OperatorError
from mindspeed.parallel import Pipeline

WIDTH = 8


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def pipelined(chunks: int, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and the gradients of this rank's stages, of two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = layers(chunks * world)[rank::world]
    pipeline = Pipeline(mine, dist.group.WORLD, len(inputs))
    for _ in range(2):
        losses = pipeline.step(inputs, lambda output, number: (output - number).square().mean())
    pipeline.close()
    return losses, [parameter.grad for stage in mine for parameter in stage.parameters()]


def refused(chunks: int, micro_batches: int) -> tuple[str, str]:
    try:
        Pipeline(layers(chunks), dist.group.WORLD, micro_batches)
    except OperatorError as error:
        (problem,) = error.problems
        return problem.message, problem.fix_text
    return "", ""
