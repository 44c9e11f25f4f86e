"""Regions, swapped layers and pipelines of plain modules: bits or gradients of the plain loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mindspeed import nn as own
from mindspeed.ops.errors import OperatorError
from mindspeed.parallel import Checkpoint, Meter, RecomputePlanner, Region, SwapActivations
from mindspeed.workbench.verification.pool import WorkerPool
from tests.parallel import ranks


class Block(nn.Module):
    """A block that keeps several activations, the output of its norm in a region where it has one."""

    def __init__(self, region: Region | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = own.RMSNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.region = region

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.region is None:
            return x + self.down(F.gelu(self.up(self.norm(x)))) * scale
        with self.region.entered(self.norm, x) as region:
            normed = self.norm(x)
        h = self.up(normed)
        region.park_after(h, normed)
        return x + self.down(F.gelu(h)) * scale


def blocks(count: int = 4, region: bool = False) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([Block(Region("norm-recompute", module="a norm") if region else None) for _ in range(count)])


def trained(net: nn.ModuleList, steps: int = 2) -> list[Tensor]:
    """Loss of the last step and all gradients, with a micro-batch whose backward is late."""
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 16)
        for block in net:
            x = block(x, scale=0.5)
        losses.append(x.square().mean())
        losses[-1].backward()
    return [losses[-1].detach(), *(parameter.grad for parameter in net.parameters())]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_swapped_layers_keep_their_bits_and_names() -> None:
    expected, net = trained(blocks()), blocks()
    names = list(net.state_dict())
    with SwapActivations(net):
        assert equal(trained(net), expected)
    assert list(net.state_dict()) == names
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in net)


def test_swapped_layers_are_away_when_the_next_layer_has_ended() -> None:
    net = blocks()
    kept: dict[int, Any] = {}

    def keep(layer: Any, inputs: Any, output: Tensor) -> None:
        kept.setdefault(0, output.untyped_storage())  # a repetition makes another one

    net[0].up.register_forward_hook(keep)
    SwapActivations(net)
    x = torch.randn(5, 16)
    for block in net:
        x = block(x)
    assert kept[0].nbytes() == 0
    x.sum().backward()


def test_region_is_recomputed_with_the_bits_of_the_plain_loop() -> None:
    assert equal(trained(blocks(region=True)), trained(blocks()))


def test_checkpoint_can_be_restored_before_backward() -> None:
    net, x = blocks(1)[0], torch.randn(5, 16, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)
    checkpoint = Checkpoint(net, [x])
    output = checkpoint.run()
    checkpoint.restore()
    output.sum().backward()
    assert torch.equal(x.grad, expected[0])
    assert checkpoint.restored == 1


def kept_after_forward(net: nn.ModuleList, x: Tensor) -> int:
    """Bytes that the layers hold between forward and backward, without input and output."""
    with Meter() as meter:
        for layer in net:
            x = layer(x)
        return meter.live.host + meter.live.device - x.nbytes


def test_recomputation_fits_a_budget_in_the_least_time() -> None:
    x, net = torch.randn(64, 16), blocks()
    expected = trained(blocks())
    planner = RecomputePlanner(net)
    with planner.measured():
        whole = kept_after_forward(net, x)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in net)
    assert planner.plan(2 * whole).recomputed == frozenset()
    plan = planner.plan(whole)
    assert 0 < len(plan.recomputed) < len(net)
    assert plan.bytes <= whole
    assert plan.seconds > 0
    for layer, name in [(layer, name) for name, layer in net.named_children() if layer in plan.recomputed]:
        setattr(net, name, checkpoint_wrapper(layer))
    assert kept_after_forward(net, x) < whole
    assert equal(trained(net), expected)


def test_budget_that_recomputation_cannot_meet_is_refused_with_one_that_it_can() -> None:
    net = blocks()
    planner = RecomputePlanner(net)
    with pytest.raises(OperatorError, match="nothing was measured"):
        planner.plan(1)
    with planner.measured():
        kept_after_forward(net, torch.randn(64, 16))
    with pytest.raises(OperatorError, match="the budget is 1 bytes") as refused:
        planner.plan(1)
    (problem,) = refused.value.problems
    assert planner.plan(int(problem.fix_text.split()[1])).recomputed == frozenset(net)


def test_meter_counts_the_bytes_of_a_module() -> None:
    with Meter() as meter:
        made = torch.ones(256)
        assert meter.live.host + meter.live.device == made.nbytes
        del made
    assert meter.peak.host + meter.peak.device == 1024


SCHEDULES = [(1, "1f1b"), (2, "interleaved"), (1, "zb-h1"), (2, "zb-h1"), (2, "zb-v"), (1, "fastest"), (2, "paired")]


@pytest.mark.parametrize(("chunks", "schedule"), SCHEDULES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_pipeline_has_the_gradients_of_the_plain_loop(pool: WorkerPool, world: int, chunks: int, schedule: str) -> None:
    inputs = [torch.randn(3, ranks.WIDTH) for _ in range(4)]
    whole = ranks.layers(chunks * world)
    for _ in range(2):
        losses = []
        for number, x in enumerate(inputs):
            for layer in whole:
                x = layer(x)
            losses.append(ranks.squared(x, number))
            losses[-1].backward()
    last = 0 if schedule == "zb-v" else world - 1
    for rank, (found, gradients) in enumerate(pool.call(ranks.pipelined, world, chunks, schedule, inputs)):
        stages = ranks.of_rank(whole, schedule, rank, world)
        expected = [parameter.grad for stage in stages for parameter in stage.parameters()]
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)
        assert len(found) == (4 if rank == last else 0)
        for one, other in zip(found, losses if found else [], strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-6)


def test_passes_that_are_paired_compute_while_tokens_travel(pool: WorkerPool) -> None:
    plain, turns = (
        pool.call(ranks.mixtures_in_a_pipeline, 2, "1f1b")[0],
        pool.call(ranks.mixtures_in_a_pipeline, 2, "paired")[0],
    )
    assert equal(turns[0], plain[0])
    assert plain[1] == 0
    assert turns[1] > 0


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_pipeline_has_the_gradients_of_torchs_schedules(pool: WorkerPool, world: int, schedule: str) -> None:
    inputs = [torch.randn(3, ranks.WIDTH) for _ in range(2 * world)]
    own_ranks, torchs = (
        pool.call(function, world, 2, schedule, inputs) for function in (ranks.pipelined, ranks.pipelined_by_torch)
    )
    for (losses, gradients), (other_losses, other_gradients) in zip(own_ranks, torchs, strict=True):
        torch.testing.assert_close(gradients, other_gradients, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(losses, [loss.detach() for loss in other_losses], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_weight_gradients_that_wait_have_the_bits_of_backward(pool: WorkerPool, autocast: bool) -> None:
    (stage,) = ranks.layers(1)
    torch.manual_seed(2)
    inputs = [torch.randn(3, ranks.WIDTH) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for number, x in enumerate(inputs):
            ranks.squared(stage(x), number).backward()
    ((found, calls),) = pool.call(ranks.weight_gradients_that_wait, 1, autocast)
    assert equal(found, [parameter.grad for parameter in stage.parameters()])
    assert calls == 2


@pytest.mark.parametrize(
    ("given", "sentence", "fix"),
    [
        ((2, 3), "3 micro-batches are not divisible by 2 ranks with interleaved stages", "use 2 or 4 micro-batches"),
        ((1, 2, "zb-2"), "no schedule 'zb-2'", "use one of 1f1b, interleaved, zb-h1, fastest, paired, zb-v"),
        ((1, 2, "zb-v"), "zb-v has two stages on each rank, but there are 1", "pass two stages on each rank"),
        (
            (1, 2, "interleaved"),
            "interleaved needs two chunks or more per rank, but vpp is 1",
            "use another schedule or number of stages",
        ),
        (
            (1, 2, "zb-h1", True),
            "this schedule computes weight gradients after the backward pass, in which DistributedDataParallel reduces them",
            "use schedule='1f1b', or reduce the gradients after the step",
        ),
    ],
)
def test_pipeline_that_cannot_run_is_refused(pool: WorkerPool, given: tuple[Any, ...], sentence: str, fix: str) -> None:
    found, _ = pool.call(ranks.refused, 2, *given)
    assert found == (f"Pipeline: {sentence}", fix)
