"""Tiny models that features are proven on, and what one training run of such a model is. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mindspeed.plugins.world import FIELDS


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A GPT-like model, by the names of `mindspeed.plugins.world.FIELDS` where they exist.

    ``bias`` adds biases to the linear layers, ``rotary`` takes rotary instead of learned positions, ``tied`` shares the
    embedding with the output layer, ``dropout`` is used in attention and behind both residual branches. With
    ``multi_latent_attention`` positions are rotary inside attention, and the key heads are as many as the query heads.
    """

    name: str
    num_layers: int = 4
    hidden_size: int = 32
    ffn_hidden_size: int = 64
    num_attention_heads: int = 4
    num_query_groups: int = 4
    num_experts: int = 0
    grouped_experts: bool = False
    vocab_size: int = 64
    seq_length: int = 24
    normalization: str = "LayerNorm"
    gated_linear_unit: bool = False
    activation: str = "gelu"
    bias: bool = True
    rotary: bool = False
    multi_latent_attention: bool = False
    tied: bool = True
    router_topk: int = 2
    dropout: float = 0.0

    def world(self) -> dict[str, Any]:
        """The fields of this shape that a plan's world knows."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in FIELDS}

    def changed(self, world: Mapping[str, Any]) -> ModelShape:
        """This shape with the values of ``world`` that describe a model."""
        return replace(self, **{name: value for name, value in world.items() if name in self.world() and value is not None})


GPT: Final = ModelShape("gpt")
LLAMA: Final = ModelShape(
    "llama",
    num_query_groups=2,
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation="silu",
    bias=False,
    rotary=True,
    tied=False,
)
MOE: Final = replace(LLAMA, name="moe", num_experts=4, ffn_hidden_size=32)
SHAPES: Final = (GPT, LLAMA, MOE)
"""In the order in which a feature tries them: the first to which it applies is taken."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training run: ``steps`` optimizer steps over ``global_batch_size`` samples each, in ``dtype`` fp32 or bf16.

    With ``documents`` samples are packed documents that do not see one another, and with ``restart`` positions begin anew
    with each of them.
    """

    shape: ModelShape
    dtype: str = "fp32"
    steps: int = 5
    micro_batch_size: int = 1
    global_batch_size: int = 8
    seed: int = 1234
    documents: bool = False
    restart: bool = False

    def world(self) -> dict[str, Any]:
        """Values that the recipe adds to a plan's world."""
        batch = {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.global_batch_size}
        return {**self.shape.world(), **batch, "dtype": self.dtype}
