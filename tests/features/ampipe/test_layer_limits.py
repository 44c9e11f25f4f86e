"""What layers in chunks refuse when they are built and called, which no plan and no configuration shows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.nn import Module

from mindspeed.features.ampipe.attention import is_causal
from mindspeed.features.ampipe.layers import ChunkedLayer, check_inputs, check_length, unfit_layers
from mindspeed.plugins import MindSpeedError


def refusal(call: Callable[..., object], *args: Any) -> list[str]:
    """The text of the refusal of a call; empty where it is accepted."""
    try:
        call(*args)
    except MindSpeedError as error:
        return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in error.problems]
    return []


def test_masks_are_causal_or_full() -> None:
    def core(kind: AttnMaskType) -> SimpleNamespace:
        return SimpleNamespace(attn_mask_type=kind)

    assert is_causal(core(AttnMaskType.causal), torch.ones(1))
    assert not is_causal(core(AttnMaskType.no_mask), None)
    assert not is_causal(core(AttnMaskType.padding), None)
    assert refusal(is_causal, core(AttnMaskType.padding), torch.ones(1)) == [
        (
            "MS304 ampipe: an attention layer has a mask of type padding, but chunks support only causal and full attention "
            "| remove ampipe"
        )
    ]


@pytest.mark.parametrize("name", ["packed_seq_params", "padding_mask", "attention_bias", "context", "context_mask"])
def test_inputs_of_the_whole_sequence_are_refused(name: str) -> None:
    assert refusal(check_inputs, {name: None, "rotary_pos_emb": object()}) == []
    assert refusal(check_inputs, {name: object()}) == [
        f"MS304 ampipe: a layer received the argument {name}, which its chunks do not support | remove ampipe"
    ]


def test_rows_that_chunks_cannot_share_are_refused() -> None:
    assert refusal(check_length, 8, 4) == []
    assert refusal(check_length, 6, 4) == ["MS304 ampipe: the 6 rows of a rank are not divisible by 4 chunks | remove ampipe"]


class Chunked(ChunkedLayer, Module):
    """A layer with the parts that a check looks at."""

    layer_number = 3

    def __init__(self, attention: type[Module], cross_attention: Module, steps: bool) -> None:
        Module.__init__(self)
        self.self_attention = Module()
        self.self_attention.core_attention = empty(attention)
        self.cross_attention = cross_attention
        self.mlp = empty(MoELayer)
        self.mlp.token_dispatcher = SimpleNamespace()
        if steps:
            self.mlp.steps = lambda: None


def empty(kind: type[Module]) -> Any:
    """An object of a class whose own constructor is not called."""
    made = kind.__new__(kind)
    Module.__init__(made)
    return made


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            (Module, IdentityOp(), True),
            "the core attention is Module, but only Megatron's local one and that of flash-attention are supported",
        ),
        ((DotProductAttention, Module(), True), "cross-attention is not supported"),
        (
            (DotProductAttention, IdentityOp(), False),
            "the MoE layer uses SimpleNamespace, which has no asynchronous transfers",
        ),
    ],
)
def test_layers_that_cannot_run_in_chunks_are_named(parts: tuple[Any, ...], text: str) -> None:
    assert unfit_layers(None, [Chunked(DotProductAttention, IdentityOp(), True)]) == []
    assert unfit_layers(None, [Chunked(*parts)]) == [f"layer 3 cannot run in chunks: {text}"]
