"""Steps of plain Adam on a tiny model in the pool: what a run ends with, to the bit, and the bytes of its optimizer at rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import Recipe


@dataclass
class Trained:
    """The results of one rank.

    ``bytes`` are those of the optimizer between steps, by kind, ``window`` the most that main weights have at a time,
    ``numbers`` the weights that are updated with main weights, ``largest`` those of the largest parameter.
    """

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    numbers: int = 0
    largest: int = 0
    window: int = 0


@contextmanager
def adam_run(recipe: Recipe) -> Iterator[Any]:
    """Build the model and the optimizer of a recipe."""
    from megatron.core import tensor_parallel

    from mindspeed.workbench.verification import training
    from mindspeed.workbench.verification.record import RankResult

    torch.manual_seed(recipe.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    yield training._Run(recipe, RankResult())


def trained(pool: WorkerPool, nproc: int, recipe: Recipe, plan: ActivationPlan) -> list[Trained]:
    """Run the steps of a recipe on every rank."""
    return [Trained(**result) for result in pool.call(train, nproc, recipe, plan=plan)]


def without_and_with(
    pool: WorkerPool, names: Sequence[str], nproc: int, also: Sequence[str], settings: dict[str, Any], world: dict[str, Any]
) -> tuple[list[Trained], list[Trained]]:
    """Every rank after five steps without and with these features, which must be equal to the bit."""
    case = build_case(names, [Layer("test", settings=settings, world={"dtype": "bf16", **world})], also, nproc)
    recipe = replace(case.recipe, steps=5)
    stock, found = trained(pool, nproc, recipe, case.baseline), trained(pool, nproc, recipe, case.plan)
    assert_equal(stock, found)
    return stock, found


def train(recipe: Recipe) -> dict[str, Any]:
    """Run the steps of a recipe on one rank and return the fields of `Trained`; classes of a job are not those of a test."""
    from mindspeed.memory import optimizer_windows as windows

    result = Trained()
    with adam_run(recipe) as run:
        managed = [manager for member in windows.members(run.optimizer) if (manager := windows.managed_by(member))]
        for manager in managed:

            @contextmanager
            def watched(window: Any, manager: Any = manager) -> Iterator[None]:
                present = [w.main.untyped_storage().nbytes() for w in manager.weights if w.weight is not None]
                result.window = max(result.window, sum(present))
                yield

            manager.contexts.append(watched)
        result.window = 0
        for step in range(recipe.steps):
            run.train_step(step)
        window = result.window
        result = record(run)
        result.window = window
    return vars(result)


def record(run: Any) -> Trained:
    """Collect what a run ends with."""
    from mindspeed.memory import optimizer_windows as windows

    if run.ddp_config.overlap_param_gather:
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)
    result = Trained(run.record.losses, [(piece.name, piece.values) for piece in run.record.pieces])
    for index, chunk in enumerate(run.chunks):
        result.weights |= {f"{index} {name}": p.detach().clone() for name, p in chunk.named_parameters()}
    result.bytes = bytes_at_rest(run.optimizer)
    result.optimizer = dict(windows.whole_tensors(run.optimizer))
    mains = [weight for member in windows.members(run.optimizer) for weight in windows.main_weights(member)]
    numbers = [weight.main.numel() for weight in mains if weight.weight is not None]
    result.numbers, result.largest = sum(numbers), max(numbers, default=0)
    return result


def bytes_at_rest(optimizer: Any) -> dict[str, int]:
    """Bytes of main weights, residuals, ties and states between steps; of the device, and under "host" of the host."""
    from mindspeed.memory import optimizer_windows as windows

    sizes = dict.fromkeys(("main", "residual", "ties", "state", "host"), 0)
    swaps: dict[int, Any] = {}
    for member in windows.members(optimizer):
        managed = windows.managed_by(member)
        for weight in managed.weights if managed else windows.main_weights(member):
            held = {"residual": weight.residual, "ties": weight.ties}
            if weight.weight is not None:
                held["main"] = weight.main
            held |= {f"state {name}": tensor for name, tensor in weight.moments.items()}
            for kind, tensor in held.items():
                if tensor is not None and tensor.is_cuda:
                    sizes[kind.partition(" ")[0]] += tensor.untyped_storage().nbytes()
        contexts = managed.contexts if managed else []
        swaps |= {id(owner): owner for context in contexts if (owner := getattr(context, "__self__", None))}
    buffers = [buffer for swap in swaps.values() for named in swap._buffers.values() for buffer in named.values()]
    return sizes | {"host": sum(buffer.nbytes for buffer in buffers)}


def assert_equal(stock: list[Trained], found: list[Trained]) -> None:
    """Compare losses, gradients, weights, main weights and states of every rank, bit for bit."""
    for reference, other in zip(stock, found, strict=True):
        assert reference.losses == other.losses
        for (name, left), (same, right) in zip(reference.gradients, other.gradients, strict=True):
            assert name == same
            assert (left == right).all(), name
        for name, weight in reference.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        assert reference.optimizer.keys() == other.optimizer.keys()
        for name, value in reference.optimizer.items():
            assert torch.equal(value, other.optimizer[name]), name
