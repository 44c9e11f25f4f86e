"""Base of features that recompute a part of each layer. Light."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import Field

from mindspeed.plugins.conditions import Check, Condition
from mindspeed.plugins.feature import Feature, FeatureArgs
from mindspeed.plugins.hookspecs import hookimpl

NORMS: Final = tuple(
    f"{norm}: {what}" for norm in ("input norm", "pre-mlp norm") for what in ("statistics", "copies", "output")
)
"""Tensors that layers keep of their norms."""
ACTIVATIONS: Final = ("mlp: activation inner", "mlp: activation output")
"""Those of activation functions."""
ATTENTION: Final = {
    "core_attention": ("attention: queries, keys, values", "attention: softmax", "attention: softmax dropout"),
    "linear_qkv": ("input norm: output",),
    "linear_proj": ("attention: output",),
}
"""Those of self-attention, by its parts."""


class LayersArgs(FeatureArgs):
    num_layers: int | None = Field(
        None, ge=1, description="layers per model chunk, behind those of a block recomputation; all if not given"
    )


def has_layers(name: str) -> Condition:
    """Refuse a ``num_layers`` of feature ``name`` that a model chunk does not have."""
    return Check(
        lambda args, world: args.num_layers <= min(filter(None, world.layers_per_chunk), default=0),
        "num_layers={args.num_layers} is more than a model chunk has, which is {world.num_layers} layers / "
        "(pp x vpp = {world.pp} x {world.vpp})",
        fix=f"give fewer layers, or drop {name}.num_layers for all of them",
        when=lambda args, world: args.num_layers is not None,
    )


class PartRecompute(Feature[LayersArgs]):
    """Recompute a part of the first layers of each model chunk that no block recomputation takes."""

    def refusals(self, config: Any) -> list[str]:
        """List what a configuration has that this part cannot be recomputed beside."""
        from mindspeed.memory.model_layers import refusals

        return refusals(config)

    def recompute(self, layer: Any) -> str | None:
        """Let a layer recompute the part; return a sentence where it cannot."""
        raise NotImplementedError

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if wrong := self.refusals(config):
            self.decline(" and ".join(wrong))

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.memory.model_layers import chosen_layers

        name = self.spec.name
        for layer in chosen_layers(chunks, self.args.num_layers, name):
            if wrong := self.recompute(layer):
                self.decline(wrong, f"build the model with local layers, or remove {name}")
