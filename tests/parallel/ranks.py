"""What the tests of `mindspeed.parallel` run on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

from mindspeed.nn import MoE
from mindspeed.ops.errors import OperatorError
from mindspeed.parallel import Pipeline

WIDTH = 8


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def of_rank(whole: list[nn.Module], schedule: str, rank: int, world: int) -> list[nn.Module]:
    return [whole[rank], whole[2 * world - 1 - rank]] if schedule == "zb-v" else whole[rank::world]


def squared(output: Tensor, target: Any) -> Tensor:
    return (output - target).square().mean()


def pipelined(chunks: int, schedule: str, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and the gradients of this rank's stages, of two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = of_rank(layers(chunks * world), schedule, rank, world)
    shape = inputs[0].shape if chunks == 1 else None
    pipeline = Pipeline(mine, dist.group.WORLD, len(inputs), schedule=schedule, shape=shape)
    for _ in range(2):
        losses = pipeline.step(inputs, squared)
    pipeline.close()
    return losses, [parameter.grad for stage in mine for parameter in stage.parameters()]


def pipelined_by_torch(chunks: int, schedule: str, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of two steps of torch's own schedule of the same modules."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = layers(chunks * world)
    mine = of_rank(whole, schedule, rank, world)
    stages = [PipelineStage(stage, whole.index(stage), len(whole), torch.device("cpu")) for stage in mine]
    kinds: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
    made = kinds[schedule](stages, len(inputs), loss_fn=squared, scale_grads=False)
    last = any(stage.is_last for stage in stages)
    targets = torch.cat([torch.full_like(x, number) for number, x in enumerate(inputs)])
    for _ in range(2):
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if last else {}
        made.step(*([torch.cat(inputs)] if rank == 0 else []), **given)
    return losses, [parameter.grad for stage in mine for parameter in stage.parameters()]


def mixtures_in_a_pipeline(schedule: str) -> tuple[list[Tensor], int]:
    """Gradients of layers with dropout and experts on all ranks, and how often two passes took turns."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "ep"))
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), MoE(WIDTH, 16, 4, 2, mesh=mesh["ep"])) for _ in range(2)]
    passes: list[str] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: passes.append("forward"))
        layer[0].weight.register_post_accumulate_grad_hook(lambda _: passes.append("backward"))
    pipeline = Pipeline([nn.Sequential(*layers)], mesh["pp"], 4, schedule=schedule)
    pipeline.step([torch.randn(12, WIDTH) for _ in range(4)], squared)
    pipeline.close()
    mixed = ["forward", "backward"] * 2
    count = sum(passes[start : start + 4] in (mixed, mixed[::-1]) for start in range(len(passes)))
    return [parameter.grad for layer in layers for parameter in layer.parameters()], count


def weight_gradients_that_wait(autocast: bool) -> tuple[list[Tensor], int]:
    """Gradients of a pipeline of one rank with zb-h1, and how often a hook of a weight was called in one step."""
    (stage,) = layers(1)
    calls = []
    weight = next(stage.parameters())
    weight.register_post_accumulate_grad_hook(calls.append)
    pipeline = Pipeline([stage], dist.group.WORLD, 2, schedule="zb-h1")
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pipeline.step([torch.randn(3, WIDTH, requires_grad=True) for _ in range(2)], squared)
    pipeline.close()
    return [parameter.grad for parameter in stage.parameters()], len(calls)


def refused(chunks: int, micro_batches: int, schedule: str = "", wrapped: bool = False) -> tuple[str, str]:
    stages = [DistributedDataParallel(stage) if wrapped else stage for stage in layers(chunks)]
    try:
        Pipeline(stages, dist.group.WORLD, micro_batches, schedule=schedule)
    except OperatorError as error:
        (problem,) = error.problems
        return problem.message, problem.fix_text
    return "", ""
