"""Layers of a model dealt out to the chunks of a pipeline, by places that stay empty or by FLOPs. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed import plugins as ms


@dataclass(frozen=True, slots=True)
class Weights:
    """FLOPs of a forward pass for a token: of a layer, and of what the last chunk computes behind its layers."""

    layer: float
    tail: float


def weights_of(world: ms.World, experts_per_token: int) -> Weights:
    """Count the FLOPs of products; an embedding has none. Core attention reads the half of a causal sequence."""
    hidden, ffn = world.hidden_size, world.ffn_hidden_size
    keys = hidden * world.num_query_groups / world.num_attention_heads
    attention = 2 * hidden * (2 * hidden + 2 * keys) + 2 * hidden * world.seq_length
    experts = experts_per_token if world.num_experts else 1
    layer = attention + 2 * (3 if world.gated_linear_unit else 2) * hidden * ffn * experts
    output = 2 * hidden * world.vocab_size
    prediction = layer + 4 * hidden * hidden + output
    return Weights(layer, output + prediction * mtp_layers(world))


def mtp_layers(world: ms.World) -> int:
    """Return the layers of multi-token prediction; a model that is not described has none."""
    return int(world.mtp_num_layers) if world.knows("mtp_num_layers") else 0


def split_by_places(layers: int, empty: Collection[int], chunks: int) -> tuple[int, ...]:
    """Return the layers of each chunk when equal shares of places are left empty at these numbers, counted from 0."""
    share, rest = divmod(layers + len(empty), chunks)
    counts = [share + (chunk < rest) for chunk in range(chunks)]
    for place in empty:
        counts[min(place // max(share, 1), chunks - 1)] -= 1
    return tuple(counts)


def split_by_weight(layers: int, weights: Weights, stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Return the layers of each chunk for which the heaviest stage is lightest, then the heaviest chunk.

    Chunk c is on stage c mod ``stages``. A layer goes where the load is least, which is the optimum for layers of one weight;
    of equal stages it goes to the latest, which keeps activations of the fewest micro-batches.
    """
    counts = [0] * (stages * chunks_per_stage)
    for _ in range(layers):
        stage = min(range(stages), key=lambda stage: (stage_load(counts, weights, stages, stage), -stage))
        chunk = min(range(stage, len(counts), stages), key=lambda chunk: (chunk_load(counts, weights, chunk), -chunk))
        counts[chunk] += 1
    return tuple(counts)


def stage_load(counts: Sequence[int], weights: Weights, stages: int, stage: int) -> float:
    """Return the FLOPs of a stage."""
    return sum(chunk_load(counts, weights, chunk) for chunk in range(stage, len(counts), stages))


def chunk_load(counts: Sequence[int], weights: Weights, chunk: int) -> float:
    """Return the FLOPs of a chunk."""
    return counts[chunk] * weights.layer + (weights.tail if chunk == len(counts) - 1 else 0.0)


def chunk_shares(counts: Sequence[int], weights: Weights) -> tuple[float, ...]:
    """Return the FLOPs of each chunk divided by their mean, as ``mindspeed schedule show --weights`` takes them."""
    loads = [chunk_load(counts, weights, chunk) for chunk in range(len(counts))]
    return tuple(load * len(loads) / sum(loads) for load in loads)


def imbalance(counts: Sequence[int], weights: Weights, stages: int) -> float:
    """Return the load of the heaviest stage divided by the mean of all stages."""
    loads = [stage_load(counts, weights, stages, stage) for stage in range(stages)]
    return max(loads) / (sum(loads) / stages)


def layout_text(counts: Sequence[int], mtp: int) -> str:
    """Return the layout in Megatron's letters: ``Ett|t|ttL`` has two, one and two layers."""
    chunks = ["t" * count for count in counts]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * mtp + "L"
    return "|".join(chunks)


def missing_layout(feature: Any, spec: Any, config: Any) -> Iterator[str]:
    """Yield a sentence for a configuration that got no layout, for the plan could not make one."""
    if config.pipeline_model_parallel_layout is None:
        yield "the plan does not contain the shape of the model"
