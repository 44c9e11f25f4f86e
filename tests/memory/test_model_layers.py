"""The layers of a model that features choose, and parts of layers that cannot leave."""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock

from mindspeed.features.activation_recompute.layers import fused_activations
from mindspeed.features.adaptive_recompute.policy import fused_parts
from mindspeed.features.norm_recompute.layers import fused_norms
from mindspeed.features.swap_attention.model_conditions import parts_of_attention
from mindspeed.memory.activations import recompute_activations
from mindspeed.memory.feature import ATTENTION
from mindspeed.memory.model_layers import chosen_layers, missing_layers
from mindspeed.memory.region_checkpoint import recompute_norms


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
    def __init__(self, layers: int = 4, taken: int = 0, fused: bool = False, uniform: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.layers = torch.nn.ModuleList(Layer(fused) for _ in range(layers))
        method = "uniform" if uniform else "block"
        full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": taken or 1}
        self.config: Any = SimpleNamespace(**full if taken or uniform else dict.fromkeys(full))


class MambaLayer(torch.nn.Module):
    layer_number = 1


def hybrid_block(pattern: str, taken: int = 0) -> Block:
    """Return a chunk with single layers, of which those of Mamba have neither attention nor an MLP."""
    block = Block(len(pattern), taken)
    for at, kind in enumerate(pattern):
        if kind == "M":
            block.layers[at] = MambaLayer()
        elif kind == "*":
            block.layers[at].mlp = block.layers[at].pre_mlp_layernorm = IdentityOp()
        else:
            block.layers[at].self_attention = block.layers[at].input_layernorm = IdentityOp()
    return block


class FullyShardedDataParallel(torch.nn.Module):
    pass


def found(condition: Any, *blocks: torch.nn.Module, **args: Any) -> list[str]:
    feature: Any = SimpleNamespace(args=SimpleNamespace(**args), spec=SimpleNamespace(name="acme"))
    return list(condition(feature, blocks))


def test_layers_are_chosen_in_each_chunk_behind_those_of_a_block_recompute():
    first, second = Block(taken=1), Block()
    assert chosen_layers([first, second], 2) == [*first.layers[1:3], *second.layers[:2]]
    assert chosen_layers([first, second], None) == [*first.layers[1:], *second.layers]


def test_a_count_that_a_chunk_does_not_have_is_refused():
    assert found(missing_layers, Block(), Block(taken=1), num_layers=3) == []
    assert found(missing_layers, Block(taken=1), num_layers=4) == [
        "4 layers are needed, but a model chunk has 4, and 1 of them are in block recomputation"
    ]


def test_a_chunk_that_is_recomputed_as_a_whole_has_no_layer_for_a_feature():
    assert chosen_layers([Block(taken=4), Block(uniform=True)], None) == []
    assert found(missing_layers, Block(taken=4), Block(uniform=True), num_layers=3) == []


def test_layers_of_a_hybrid_model_are_those_with_the_part():
    block = hybrid_block("*-M*-")
    attention, mlp, mamba, *_ = block.layers
    assert chosen_layers([block], None, "self_attention") == [attention, block.layers[3]]
    assert chosen_layers([block], 1, "mlp") == [mlp]
    assert chosen_layers([block], None) == [*block.layers]
    assert [recompute_norms(layer, "acme") for layer in block.layers] == [[]] * 5
    assert recompute_activations(mamba, "acme") == []
    assert found(fused_parts, block) == ["every norm and every activation is fused into another function"]


def test_layers_of_a_hybrid_models_prediction_are_left_alone(monkeypatch):
    class HybridStack(Block):
        is_mtp_layer = False

    monkeypatch.setitem(sys.modules, "megatron.core.models.hybrid.hybrid_block", SimpleNamespace(HybridStack=HybridStack))
    decoder, prediction = HybridStack(), HybridStack()
    prediction.is_mtp_layer = True
    assert chosen_layers([torch.nn.ModuleList([decoder, prediction])], None) == [*decoder.layers]


def test_a_count_that_a_chunk_of_a_hybrid_model_does_not_have_is_refused():
    assert found(missing_layers, hybrid_block("*-*-"), hybrid_block("**"), num_layers=2, part="mlp") == []
    assert found(missing_layers, hybrid_block("*-*-M", taken=2), num_layers=2, part="mlp") == [
        "2 layers are needed, but a model chunk has 2, and 1 of them are in block recomputation"
    ]


def test_sharded_weights_are_refused():
    assert found(missing_layers, FullyShardedDataParallel(), Block()) == [
        "weights are fully sharded (FSDP) and not gathered when acme needs them"
    ]


def test_a_norm_inside_a_linear_layer_has_no_region():
    assert recompute_norms(Layer(fused=True), "acme") == []
    assert len(recompute_norms(Layer(), "acme")) == 2
    assert found(fused_norms, Block(layers=1), num_layers=None) == []
    assert found(fused_norms, Block(fused=True), num_layers=1) == ["layer 1 has a norm fused into a linear layer"]


def test_an_activation_inside_another_function_has_no_region():
    assert recompute_activations(Layer(), "acme") == []
    assert found(fused_activations, Block(), num_layers=1) == [
        "the activation of layer 1 (Identity) is fused into another function"
    ]


def test_a_model_of_which_nothing_can_leave_is_refused():
    assert found(fused_parts, Block()) == []
    assert found(fused_parts, Block(fused=True)) == ["every norm and every activation is fused into another function"]


def test_parts_of_attention_are_known_by_their_exact_names():
    assert found(parts_of_attention, Block(), modules=tuple(ATTENTION)) == []
    assert found(parts_of_attention, Block(), modules=("linear_qkw",)) == [
        "no attention layer of the model has a module linear_qkw; use linear_qkv, linear_proj"
    ]


def test_the_input_of_a_linear_layer_with_its_norm_stays():
    assert found(parts_of_attention, Block(fused=True), modules=("core_attention", "linear_proj")) == []
    assert found(parts_of_attention, Block(fused=True), modules=("linear_qkv",)) == [
        "linear_qkv includes the norm, so its input cannot be offloaded: the residual connection needs it too; remove "
        "linear_qkv from the modules"
    ]
