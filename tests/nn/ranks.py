"""What the tests of `mindspeed.nn` run on every rank: shares of one computation, put together again."""

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mindspeed import nn as own
from mindspeed.ops.errors import OperatorError
from mindspeed.parallel import Meter


def gathered(x: Tensor) -> list[Tensor]:
    """The tensors of all ranks."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.detach().contiguous())
    return found


def attend(tensors: list[Tensor], keywords: dict[str, Any], call: dict[str, Any], as_mesh: bool) -> list[Tensor]:
    """Result and gradients of context-parallel attention, all tokens of them, after a copy and a pickle of the module."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"] if as_mesh else dist.group.WORLD
    module = pickle.loads(pickle.dumps(copy.deepcopy(own.ContextParallelAttention(mesh, **keywords))))
    *inputs, towards = (module.shard(x).clone() for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]
    out = module(*leaves, **call)
    out.backward(towards)
    assert torch.equal(module.positions(tensors[0].shape[1]), module.shard(torch.arange(tensors[0].shape[1]), 0))
    return [module.unshard(x) for x in (out, *(leaf.grad for leaf in leaves))]


def hybrid_on_a_mesh_of_two_dimensions(tensors: list[Tensor]) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    module = own.ContextParallelAttention(mesh, algorithm="hybrid")
    return module.unshard(module(*(module.shard(x) for x in tensors[:3])))


def feed_forward(x: Tensor, towards: Tensor, sequence_parallel: bool, chunks: int) -> list[Tensor]:
    """Output and gradients of two linear layers in one, those of weights and bias put together."""
    torch.manual_seed(3)
    first, second = nn.Linear(x.shape[-1], 32), nn.Linear(32, x.shape[-1])
    settings: dict[str, Any] = {"sequence_parallel": sequence_parallel, "chunks": chunks}
    column = own.ColumnParallelLinear.from_linear(first, dist.group.WORLD, **settings)
    row = own.RowParallelLinear.from_linear(second, dist.group.WORLD, **settings)
    share = [part.chunk(dist.get_world_size())[dist.get_rank()] if sequence_parallel else part for part in (x, towards)]
    given = share[0].clone().requires_grad_()
    out = row(torch.relu(column(given)))
    out.backward(share[1])
    tokens = [torch.cat(gathered(part)) if sequence_parallel else part.detach() for part in (out, given.grad)]
    weights = [
        torch.cat(gathered(part), dim) for part, dim in ((column.weight.grad, 0), (column.bias.grad, 0), (row.weight.grad, 1))
    ]
    return [*tokens, *weights, row.bias.grad]


def feed_forward_on_a_grid(x: Tensor, towards: Tensor, chunks: int) -> list[Tensor]:
    """Output, and gradients of the input and of the last bias, with weights that are split along both dimensions."""
    torch.manual_seed(3)
    first, second = nn.Linear(x.shape[-1], 32), nn.Linear(32, x.shape[-1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    column = own.ColumnParallelLinear.from_linear(first, mesh, sequence_parallel=True, chunks=chunks)
    row = own.RowParallelLinear.from_linear(second, mesh, sequence_parallel=True, chunks=chunks)
    given, gradient = (part.chunk(4)[dist.get_rank()].clone() for part in (x, towards))
    out = row(torch.relu(column(given.requires_grad_())))
    out.backward(gradient)
    sums = [column.weight.grad.square().sum(), row.weight.grad.square().sum(), column.bias.grad.sum()]
    for total in sums:
        dist.all_reduce(total)
    return [torch.cat(gathered(out)), torch.cat(gathered(given.grad)), row.bias.grad, *sums]


def mixture(x: Tensor, towards: Tensor, keywords: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of a mixture of experts over all ranks, those of experts put together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    whole = own.MoE(x.shape[-1], 24, 8, 2, shared_size=8)
    moe = own.MoE(x.shape[-1], 24, 8, 2, shared_size=8, mesh=dist.group.WORLD, **keywords)
    state = {name: value.chunk(world)[rank] if name in ("up", "down") else value for name, value in whole.state_dict().items()}
    moe.load_state_dict(state)
    given = x.chunk(world)[rank].clone().requires_grad_()
    out = moe(given)
    out.backward(towards.chunk(world)[rank])
    replicas = [parameter.grad for name, parameter in moe.named_parameters() if name not in ("up", "down")]
    for gradient in replicas:
        dist.all_reduce(gradient)
    return [torch.cat(gathered(part)) for part in (out, given.grad, moe.up.grad, moe.down.grad)] + replicas


def kept_by_a_mixture(keywords: dict[str, Any]) -> int:
    """Bytes that a mixture holds between forward and backward."""
    torch.manual_seed(4)
    moe = own.MoE(16, 24, 8, 2, mesh=dist.group.WORLD, **keywords)
    x = torch.randn(64, 16, requires_grad=True)
    with Meter() as meter:
        output = moe(x)
        dist.barrier()  # a transfer lets go of its tensors a moment after it is waited for
        kept = meter.live.host + meter.live.device
    output.sum().backward()
    return kept


def loss_over_classes(hidden: Tensor, target: Tensor) -> list[Tensor]:
    """Loss and gradients with the classes split over ranks."""
    torch.manual_seed(5)
    whole = own.LinearCrossEntropyLoss(hidden.shape[-1], 24)
    loss = own.LinearCrossEntropyLoss(hidden.shape[-1], 24, chunks=2, mesh=dist.group.WORLD)
    loss.linear.weight.data.copy_(whole.linear.weight.chunk(dist.get_world_size())[dist.get_rank()])
    given = hidden.clone().requires_grad_()
    found = loss(given, target)
    found.backward()
    return [found.detach(), given.grad, torch.cat(gathered(loss.linear.weight.grad))]


class Layer(nn.Module):
    """A layer of all modules that have no communication of their own, and context-parallel attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = own.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rope, self.moe = own.RotaryEmbedding(8, 32), own.MoE(width, 16, 4, 2)
        self.attention = own.ContextParallelAttention(dist.group.WORLD)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 8)).unbind(2)
        x = x + self.out(self.attention(self.rope(q, positions), self.rope(k, positions), v).flatten(2))
        return x + self.moe(x)


def data_parallel(x: Tensor, wrapped: bool) -> list[Tensor]:
    """Gradients of a layer's weights, averaged by torch's wrapper or here, over the ranks of context parallelism."""
    torch.manual_seed(6)
    layer: Any = Layer(x.shape[-1])
    share, positions = layer.attention.shard(x), layer.attention.positions(x.shape[1])
    run = DistributedDataParallel(layer) if wrapped else layer
    run(share, positions).square().mean().backward()
    for parameter in [] if wrapped else layer.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [parameter.grad for parameter in layer.parameters()]


def refusals(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[tuple[str, str]]:
    """The sentence and the fix of each module that is refused, on all ranks or on a mesh of two dimensions."""
    square = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    meshes = {"world": dist.group.WORLD, "square": square}
    found = []
    for name, args, keywords in calls:
        batch = keywords.pop("shard", None)
        try:
            module = getattr(own, name)(*args, **keywords | {"mesh": meshes[keywords["mesh"]]})
            module.shard(batch)
        except OperatorError as error:
            (problem,) = error.problems
            found.append((problem.message, problem.fix_text))
    return found
