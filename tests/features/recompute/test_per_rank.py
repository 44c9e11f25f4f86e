"""Layers of block recomputation that are counted per pipeline rank, and dealt out to the rank's model chunks in turn."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.recompute.feature import saved
from mindspeed.features.recompute.layers import with_shares
from mindspeed.features.recompute.rules import RecomputeArgs
from mindspeed.job.world import World, share_of_chunk
from mindspeed.plugins.saved_tensors import SavedTensor
from tests.features.resolving import ask
from tests.memory.test_model_layers import Block

BLOCK = {"granularity": "full", "method": "block", "per_rank": True}


@pytest.mark.parametrize(
    ("layers", "chunks", "shares"), [(2, 4, [1, 1, 0, 0]), (5, 2, [3, 2]), (3, 1, [3]), (0, 2, [0, 0]), (8, 4, [2, 2, 2, 2])]
)
def test_layers_of_a_rank_are_dealt_out_in_turn(layers: int, chunks: int, shares: list[int]) -> None:
    assert [share_of_chunk(layers, chunk, chunks) for chunk in range(chunks)] == shares


def test_each_model_chunk_recomputes_its_share() -> None:
    chunks = [Block(layers=2, taken=3), Block(layers=2, taken=3)]
    shared = chunks[1].config = chunks[0].config
    made = with_shares(lambda config, chunks, **rest: (chunks, rest))(SimpleNamespace(), chunks, weight=1)
    assert made == (chunks, {"weight": 1})
    assert [chunk.config.recompute_num_layers for chunk in chunks] == [2, 1]
    assert shared.recompute_num_layers == 3


def test_the_planner_counts_the_share_of_each_chunk() -> None:
    def kept(chunk: int) -> dict[str, int]:
        tensors = (SavedTensor("layer input", 8, 1, chunk=chunk), SavedTensor("attention: output", 8, 1, chunk=chunk))
        world = World({"num_layers": 8, "pp": 2, "vpp": 4})
        left = saved(RecomputeArgs(num_layers=2, **BLOCK), world, tensors)
        return {tensor.name: tensor.layers for tensor in left if tensor.held == "kept"}

    assert [kept(chunk) for chunk in range(4)] == [{"layer input": 1}] * 2 + [{"layer input": 1, "attention: output": 1}] * 2


@pytest.mark.parametrize(("layers", "idle"), [(2, False), (4, True)])
def test_a_feature_acts_in_the_chunks_that_are_left(layers: int, idle: bool) -> None:
    settings: dict[str, dict[str, Any]] = {"recompute": BLOCK | {"num_layers": layers}}
    resolution = ask("recompute", "norm-recompute", settings=settings, pp=2, vpp=4)
    assert resolution.problems == []
    text = "every layer is recomputed as a whole, so norm-recompute has nothing to do"
    assert (text in [row.text for row in resolution.rows]) == idle
