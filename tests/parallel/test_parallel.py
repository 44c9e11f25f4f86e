"""Regions, swapped layers and pipelines of plain modules: bits or gradients of the plain loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed import nn as own
from mindspeed.parallel import Checkpoint, Meter, Region, SwapActivations
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


def test_meter_counts_the_bytes_of_a_module() -> None:
    with Meter() as meter:
        made = torch.ones(256)
        assert meter.live.host + meter.live.device == made.nbytes
        del made
    assert meter.peak.host + meter.peak.device == 1024


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_pipeline_has_the_gradients_of_the_plain_loop(pool: WorkerPool, world: int, chunks: int) -> None:
    inputs = [torch.randn(3, ranks.WIDTH) for _ in range(4)]
    whole = ranks.layers(chunks * world)
    for _ in range(2):
        losses = []
        for number, x in enumerate(inputs):
            for layer in whole:
                x = layer(x)
            losses.append((x - number).square().mean())
            losses[-1].backward()
    for rank, (found, gradients) in enumerate(pool.call(ranks.pipelined, world, chunks, inputs)):
        expected = [parameter.grad for stage in whole[rank::world] for parameter in stage.parameters()]
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)
        assert len(found) == (4 if rank == world - 1 else 0)
        for one, other in zip(found, losses if found else [], strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-6)


def test_pipeline_names_the_numbers_of_micro_batches_that_would_do(pool: WorkerPool) -> None:
    found, _ = pool.call(ranks.refused, 2, 2, 3)
    assert found == (
        "Pipeline: 3 micro-batches are not divisible by 2 ranks with interleaved stages",
        "use 2 or 4 micro-batches",
    )
