"""The layers whose attention is offloaded, and those whose MLP is recomputed instead of whole layers."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from mindspeed.features.swap_attention.layers import recompute_mlps
from mindspeed.job.world import World
from mindspeed.memory.attention import swap_attention
from mindspeed.memory.swap import LayerSwap
from mindspeed.plugins.saved_tensors import SavedTensor
from tests.features.resolving import CATALOG, ask
from tests.memory.test_model_layers import Block

NAME = "swap-attention"
LAYER = ("layer input", "attention: queries, keys, values", "input norm: output", "attention: output")
DENSE, SPARSE = "mlp: activation input", "experts: activation input"


class Experts(MoELayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.moe_layer_recompute = False


def test_the_first_layers_recompute_their_mlp_or_experts() -> None:
    block = Block()
    block.layers[1].mlp = Experts()
    recompute_mlps(block, 2)
    assert block.layers[0].recompute_mlp
    assert block.layers[1].mlp.moe_layer_recompute
    assert not hasattr(block.layers[2], "recompute_mlp")


def test_layers_behind_the_count_keep_their_attention() -> None:
    swapped = swap_attention(LayerSwap(), Block(), ("core_attention",), NAME, 2)
    assert [layer.part.active for layer in swapped] == [True, True, False, False]


def test_the_input_of_a_linear_layer_with_its_norm_is_not_offloaded_by_default() -> None:
    swapped = swap_attention(LayerSwap(), Block(fused=True), ("linear_qkv",), NAME)
    assert [layer.part.active for layer in swapped] == [False] * 4


def held(settings: dict[str, Any], chunk: int, dense: int = 2, sparse: int = 0, **job: Any) -> dict[tuple[str, str], int]:
    """Return the layers of a chunk that have each tensor, by its name and place, without those that keep it."""
    layers = dense + sparse
    tensors = [SavedTensor(name, 8, layers, chunk=chunk) for name in LAYER]
    tensors += [SavedTensor(DENSE, 8, dense, chunk=chunk)] * bool(dense)
    tensors += [SavedTensor(SPARSE, 8, sparse, chunk=chunk)] * bool(sparse)
    feature = CATALOG.feature(NAME)
    made = feature(feature.Args(**settings), World({"num_layers": 8} | job)).saved_tensors(tuple(tensors))
    return {(t.name, t.held): t.layers for t in made if t.held in ("swapped", "recomputed")}


@pytest.mark.parametrize(
    ("settings", "chunk", "swapped", "recomputed"),
    [
        ({}, 0, 2, 0),
        ({"mlp_layers": 1}, 1, 2, 1),
        ({"attention_layers": 1, "mlp_layers": 2}, 0, 1, 2),
        ({"mlp_layers": 3, "per_rank": True}, 0, 2, 2),
        ({"mlp_layers": 3, "per_rank": True}, 1, 2, 1),
    ],
)
def test_the_planner_counts_the_layers_of_each_chunk(
    settings: dict[str, Any], chunk: int, swapped: int, recomputed: int
) -> None:
    expected = {(name, "swapped"): swapped for name in LAYER[1:]}
    expected |= {(DENSE, "recomputed"): recomputed} if recomputed else {}
    assert held(settings, chunk, pp=2, vpp=2) == expected


def test_dense_layers_come_before_those_with_experts() -> None:
    found = held({"mlp_layers": 2}, 0, dense=1, sparse=3)
    assert (found[DENSE, "recomputed"], found[SPARSE, "recomputed"]) == (1, 1)


def test_the_default_leaves_out_what_a_model_does_not_allow_and_says_so() -> None:
    resolution = ask(NAME, engine_over_local=True, transformer_engine_layers=True)
    assert resolution.problems == []
    text = "linear_qkv includes the norm, whose input the residual connection needs too: its input is kept on the device"
    assert text in [row.text for row in resolution.rows]
    names = {name for name, _ in held({}, 0, engine_over_local=True)}
    assert names == {"attention: queries, keys, values", "attention: output"}
    assert ask(NAME, multi_latent_attention=True).problems == []
