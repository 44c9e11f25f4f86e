"""nano-pipe against Megatron's own schedules in the same layout: equal bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
OVERLAPS = ("distributed-optimizer", "async-ddp", "async-param-gather")


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_weight_gradients_behind_are_megatrons_for_every_number_of_micro_batches(prove: Prove, vpp: int, batch: int) -> None:
    also = ["virtual-pipeline"] if vpp > 1 else ["pipeline-parallel"]
    world = {"pp": 2, "vpp": vpp, "micro_batch_size": 1, "global_batch_size": batch}
    assert prove("nano-pipe", also=also, world=world, nproc=2).problems == []


@pytest.mark.parametrize(
    ("also", "world", "settings"),
    [
        (["matmul-add"], {"dtype": "bf16"}, {}),
        (["matmul-add"], {}, {"nano-pipe": {"lag": 2, "output_layer": True}}),
        (["moe-token-permute"], {}, {}),
        ([], {"global_batch_size": 16}, {"nano-pipe": {"lag": 3, "swap": True}, "cpu-platform": {"poison": True}}),
        (["recompute"], {}, FULL),
        (["recompute"], {}, {"recompute": {"granularity": "selective"}, "pipeline-parallel": {"free_outputs": True}}),
    ],
)
@pytest.mark.parametrize("vpp", [1, 2])
def test_other_models_and_gradients_are_megatrons(
    prove: Prove, also: list[str], world: dict[str, Any], settings: dict[str, Any], vpp: int
) -> None:
    pipeline = "virtual-pipeline" if vpp > 1 else "pipeline-parallel"
    verdict = prove("nano-pipe", also=[pipeline, *also], settings=settings, world={"pp": 2, "vpp": vpp, **world}, nproc=2)
    assert verdict.problems == []


@pytest.mark.parametrize(
    ("also", "world"),
    [
        (["sequence-parallel"], {"tp": 2}),
        (["tensor-parallel"], {"tp": 2}),
        (["ring-attention"], {"cp": 2}),
        (OVERLAPS, {}),
    ],
)
@pytest.mark.parametrize("vpp", [1, 2])
def test_other_layouts_on_four_ranks_are_megatrons(prove: Prove, also: list[str], world: dict[str, Any], vpp: int) -> None:
    pipeline = "virtual-pipeline" if vpp > 1 else "pipeline-parallel"
    assert prove("nano-pipe", also=[pipeline, *also], world={"pp": 2, "vpp": vpp, **world}, nproc=4).problems == []
