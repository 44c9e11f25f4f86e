"""The layers of a HybridModel, which a pattern such as ``*-*-|*E*E/*-`` lists one by one. Light, no torch.

A character is one layer, ``|`` ends a segment (a model chunk of a pipeline stage, chunks before stages), and what follows a
``/`` are the layers of one depth of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

ATTENTION: Final = "*+D"
MLP: Final = "-"
EXPERTS: Final = "E"
LATENT: Final = "+D"
RECURRENT: Final = "MG"
KINDS: Final[Mapping[str, str]] = {
    "*": "attention",
    "+": "multi-latent attention",
    "D": "sparse attention",
    "-": "an MLP",
    "E": "experts",
    "M": "Mamba",
    "G": "a gated delta net",
}
"""Layers that Megatron builds, by their character."""


class Mistake(NamedTuple):
    """A sentence about the character ``at`` of a pattern."""

    at: int
    text: str


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """A pattern that was read: the segments of the decoder, and the layers of each depth of multi-token prediction."""

    text: str
    segments: tuple[str, ...]
    predictions: tuple[str, ...]

    @property
    def layers(self) -> str:
        """The layers of the decoder, one character each."""
        return "".join(self.segments)

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each segment; empty where Megatron deals them out in equal shares."""
        return tuple(map(len, self.segments)) if len(self.segments) > 1 else ()

    def count(self, kinds: str, until: int | None = None) -> int:
        """Count the layers of the decoder that have one of these characters, up to layer ``until`` where that is given."""
        return sum(layer in kinds for layer in self.layers[:until])

    @property
    def transformer_layers(self) -> int:
        """Layers of the GPTModel with the same layers in the same order; 0 where none has them."""
        attention, after = set(self.layers[::2]), set(self.layers[1::2])
        is_one = len(attention) == len(after) == 1 and attention <= set(ATTENTION) and after <= {MLP, EXPERTS}
        return len(self.layers) // 2 if is_one and len(self.layers) % 2 == 0 and not self.predictions else 0

    def marked(self, at: int) -> str:
        """Return two lines: the pattern, and a mark under one of its characters."""
        return f"    {self.text}\n    {' ' * at}^"

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what is wrong with the pattern itself, in the order of its characters."""
        if not self.layers:
            yield Mistake(0, "the pattern contains no layer of the decoder")
        end = self.text.find("/") if "/" in self.text else len(self.text)
        for at, layer in enumerate(self.text):
            if layer == "|" and at > end:
                yield Mistake(at, "multi-token prediction is not split into segments")
            elif layer not in KINDS and layer not in "|/":
                yield Mistake(at, f"{layer!r} is not a layer of Megatron; the layers are {' '.join(KINDS)}")
        start = end
        for part in self.predictions:
            if part != self.predictions[0]:
                yield Mistake(
                    start + 1, f"each depth of multi-token prediction must have the same layers, {self.predictions[0]!r}"
                )
            start += len(part) + 1
        latent = next((at for at, layer in enumerate(self.text) if layer in LATENT), -1)
        if latent >= 0 and "*" in self.text:
            yield Mistake(latent, "a model cannot have two kinds of attention, * and +")


@lru_cache(maxsize=64)
def pattern_of(text: str) -> HybridPattern:
    """Read a pattern, whatever it has; `HybridPattern.mistakes` lists its mistakes."""
    decoder, *predictions = text.split("/")
    return HybridPattern(text, tuple(decoder.split("|")), tuple(predictions) if any(predictions) else ())


def segmented(text: str, chunks: int) -> str:
    """Return a pattern with a segment of equal length for each model chunk, where it has no segments and they divide it."""
    pattern = pattern_of(text)
    share, rest = divmod(len(pattern.layers), chunks)
    if rest or len(pattern.segments) > 1:
        return text
    segments = (pattern.layers[chunk * share : (chunk + 1) * share] for chunk in range(chunks))
    return "/".join(("|".join(segments), *pattern.predictions))


def facts_of_pattern(text: str, stages: int) -> dict[str, Any]:
    """Return the fields of a job that a pattern gives, with this number of pipeline stages.

    The norm at the end of a HybridModel is always Transformer Engine's, and so are the layers of Megatron's own specs.
    """
    pattern = pattern_of(text)
    chunks, rest = divmod(len(pattern.segments), max(1, stages))
    facts: dict[str, Any] = {
        "hybrid_layer_pattern": text,
        "num_layers": len(pattern.layers),
        "moe_layers": pattern.count(EXPERTS),
        "mtp_num_layers": len(pattern.predictions),
        "transformer_engine_layers": True,
    }
    if len(pattern.segments) > 1:
        facts["vpp"] = 1 if rest or stages <= 1 else max(1, chunks)
    if pattern.count(EXPERTS):
        facts["grouped_experts"] = True
    return facts | ({"multi_latent_attention": True} if pattern.count(LATENT) else {})
