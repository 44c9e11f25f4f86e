"""Base of features that recompute a part of each layer. Light."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeVar

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensors, leave

NORMS: Final = tuple(
    f"{norm}: {what}" for norm in ("input norm", "pre-mlp norm") for what in ("statistics", "copies", "output")
)
"""Tensors that layers keep of their norms."""
ACTIVATIONS: Final = {
    owner: tuple(f"{owner}: activation {what}" for what in ("inner", "output"))
    for owner in ("mlp", "shared experts", "experts")
}
"""Those of activation functions, by what computes them."""
MLP: Final = ("mlp: activation input", *ACTIVATIONS["mlp"])
"""Those of an MLP."""
EXPERTS: Final = (
    *("experts: activation input", *ACTIVATIONS["experts"]),
    *("shared experts: activation input", *ACTIVATIONS["shared experts"]),
    *("moe: dispatched tokens", "moe: routing"),
)
"""Those of a layer of experts."""
ATTENTION: Final = {
    "core_attention": ("attention: queries, keys, values", "attention: softmax", "attention: softmax dropout"),
    "linear_qkv": ("input norm: output",),
    "linear_proj": ("attention: output",),
}
"""Those of self-attention, by its parts."""


class LayersArgs(ms.FeatureArgs):
    part: ClassVar[str] = ""
    """The part that a layer needs, where layers of a hybrid model have one each."""

    num_layers: int | None = ms.Field(
        None,
        ge=1,
        description="Number of layers per model chunk in which the feature acts (default: all). Layers that are recomputed "
        "as a whole (--recompute-method block) are not counted. In a HybridModel, only layers with the part that the feature "
        "recomputes are counted",
    )


LayersArgsT = TypeVar("LayersArgsT", bound=LayersArgs)


class PartRecompute(ms.Feature[LayersArgsT], ABC):
    """Recompute a part of the first layers of each model chunk that no block recomputation takes."""

    @abstractmethod
    def recomputed_tensors(self) -> Sequence[str]:
        """Return the names of the tensors that are not kept."""

    @abstractmethod
    def recompute(self, layer: Any) -> object:
        """Let a layer recompute the part."""

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return leave(tensors, self.recomputed_tensors(), "recomputed", self.spec.name, self.args.num_layers)

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.memory.model_layers import chosen_layers

        for layer in chosen_layers(chunks, self.args.num_layers, self.args.part):
            self.recompute(layer)
