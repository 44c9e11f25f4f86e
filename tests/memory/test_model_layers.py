"""The layers of a model that features choose, and parts of layers that cannot leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock

from mindspeed.memory.activations import recompute_activations
from mindspeed.memory.attention import MODULES, refused_modules
from mindspeed.memory.model_layers import chosen_layers
from mindspeed.memory.norms import recompute_norms
from mindspeed.plugins import MindSpeedError


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("core_attention", "linear_qkv", "linear_proj", "q_layernorm"):
            self.add_module(name, torch.nn.Identity())


class Layer(torch.nn.Module):
    layer_number = 1

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.input_layernorm = IdentityOp() if fused else torch.nn.LayerNorm(4)
        self.pre_mlp_layernorm = torch.nn.LayerNorm(4)
        self.self_attention = Attention()
        self.mlp = torch.nn.Identity()


class Block(TransformerBlock):
    def __init__(self, layers: int = 4, taken: int = 0, fused: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleList(Layer(fused) for _ in range(layers))
        full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": taken}
        self.config: Any = SimpleNamespace(**full if taken else dict.fromkeys(full))


class FullyShardedDataParallel(torch.nn.Module):
    pass


def refusal(*blocks: torch.nn.Module, count: int | None = None) -> str:
    with pytest.raises(MindSpeedError) as error:
        chosen_layers(blocks, count, "acme")
    return str(error.value)


def test_layers_are_chosen_in_each_chunk_behind_those_of_a_block_recompute():
    first, second = Block(taken=1), Block()
    assert chosen_layers([first, second], 2, "acme") == [*first.layers[1:3], *second.layers[:2]]
    assert chosen_layers([first, second], None, "acme") == [*first.layers[1:], *second.layers]


def test_a_count_that_a_chunk_does_not_have_is_refused():
    assert refusal(Block(), count=5) == (
        "MS304 acme: num_layers=5 is asked for, and a model chunk has 4 layers, 0 of them in block recomputation\n"
        "  fix: --set acme.num_layers=4, or remove acme"
    )
    assert refusal(Block(taken=4)) == (
        "MS304 acme: every layer is asked for, and a model chunk has 4 layers, 4 of them in block recomputation\n"
        "  fix: use fewer layers of block recomputation, or remove acme"
    )


def test_sharded_weights_are_refused():
    assert refusal(FullyShardedDataParallel(), Block()) == (
        "MS304 acme: sharded weights are not there when a layer is repeated\n  fix: train without FSDP, or remove acme"
    )


def test_a_norm_inside_a_linear_layer_has_no_region():
    assert recompute_norms(Layer(fused=True), "acme") == []
    assert len(recompute_norms(Layer(), "acme")) == 2


def test_an_activation_inside_another_function_has_no_region():
    assert recompute_activations(Layer(), "acme") == []


def test_parts_of_attention_are_known_by_their_exact_names():
    assert refused_modules([Block()], MODULES, "acme") is None
    assert refused_modules([Block()], ["linear_qkw"], "acme") == (
        "no attention of the model has a part linear_qkw",
        "use linear_qkv, linear_proj in acme.modules",
    )


def test_the_input_of_a_linear_layer_with_its_norm_stays():
    assert refused_modules([Block(fused=True)], ["core_attention", "linear_proj"], "acme") is None
    assert refused_modules([Block(fused=True)], ["linear_qkv"], "acme") == (
        "the norm is inside linear_qkv, whose input the residual needs too",
        "leave linear_qkv out of acme.modules",
    )
