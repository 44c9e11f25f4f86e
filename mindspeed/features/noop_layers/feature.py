"""Chunks of a pipeline with different numbers of layers, through Megatron's own layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import field_validator

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import has_stages, layers_have_no_pattern
from mindspeed.pipeline.operations import PipelineShape


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


def pipeline_of(world: ms.World) -> PipelineShape:
    """Return the pipeline of a job, whose chunks in the order of the model are its stages."""
    return PipelineShape(world.pp, world.vpp, 1, "v" if world.v_placement and world.vpp == 2 else "loop")


def split_by_weight(layers: int, weights: Weights, shape: PipelineShape) -> tuple[int, ...]:
    """Return the layers of each chunk for which the heaviest rank is lightest, then the heaviest chunk.

    A layer goes where the load is least, which is the optimum for layers of one weight; of equal ranks it goes to the latest,
    which keeps activations of the fewest micro-batches in a loop.
    """
    counts = [0] * shape.stages
    for _ in range(layers):
        rank = min(range(shape.pp), key=lambda rank: (rank_load(counts, weights, shape, rank), -rank))
        chunk = min(chunks_of(shape, rank), key=lambda chunk: (chunk_load(counts, weights, chunk), -chunk))
        counts[chunk] += 1
    return tuple(counts)


def chunks_of(shape: PipelineShape, rank: int) -> list[int]:
    """Return the chunks of a rank, counted over the whole model."""
    return [shape.stage_of(rank, chunk) for chunk in range(shape.vpp)]


def rank_load(counts: Sequence[int], weights: Weights, shape: PipelineShape, rank: int) -> float:
    """Return the FLOPs of a rank."""
    return sum(chunk_load(counts, weights, chunk) for chunk in chunks_of(shape, rank))


def chunk_load(counts: Sequence[int], weights: Weights, chunk: int) -> float:
    """Return the FLOPs of a chunk."""
    return counts[chunk] * weights.layer + (weights.tail if chunk == len(counts) - 1 else 0.0)


def chunk_shares(counts: Sequence[int], weights: Weights) -> tuple[float, ...]:
    """Return the FLOPs of each chunk divided by their mean, as ``mindspeed schedule show --weights`` takes them."""
    loads = [chunk_load(counts, weights, chunk) for chunk in range(len(counts))]
    return tuple(load * len(loads) / sum(loads) for load in loads)


def imbalance(counts: Sequence[int], weights: Weights, shape: PipelineShape) -> float:
    """Return the load of the heaviest rank divided by the mean of all ranks."""
    loads = [rank_load(counts, weights, shape, rank) for rank in range(shape.pp)]
    return max(loads) / (sum(loads) / shape.pp)


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


class NoopLayersArgs(ms.FeatureArgs):
    layers: int | tuple[int, ...] | str = ms.Field(
        "auto",
        description="Positions without a layer (no-ops), so that stages have different numbers of layers. Positions count "
        "from 0 over layers and no-ops; auto = balance the work of stages. A HybridModel is refused",
    )
    experts_per_token: int = ms.Field(2, ge=1, description="Experts per token (top-k), used by layers=auto to count MoE FLOPs")

    @field_validator("layers")
    @classmethod
    def _places_are_numbers(cls, layers: int | tuple[int, ...] | str) -> int | tuple[int, ...] | str:
        places = places_of(layers)
        if places is None and layers != "auto":
            text = "no-op positions must be whole numbers from 0, separated by commas, or auto"
            raise ms.SettingsError(text, ms.Fix.give_setting("layers", "auto"))
        if len(set(places or ())) != len(places or ()):
            raise ms.SettingsError("a position is given twice", ms.Fix.give_setting("layers", note="give each position once"))
        return layers


def places_of(layers: int | tuple[int, ...] | str) -> tuple[int, ...] | None:
    """Return the places that a setting names, one number, several, or the text ``0,7``; None for what names none."""
    parts = layers.split(",") if isinstance(layers, str) else layers if isinstance(layers, tuple) else (layers,)
    texts = [str(part).strip() for part in parts]
    return tuple(map(int, texts)) if all(text.isdigit() for text in texts) else None


def _has_places(args: NoopLayersArgs, world: ms.World) -> bool:
    """Return whether no-op positions are listed instead of auto."""
    return places_of(args.layers) is not None


def split_of(args: NoopLayersArgs, world: ms.World) -> tuple[int, ...]:
    """Return the layers of each chunk in the order of the model."""
    places = places_of(args.layers)
    if places is None:
        weights = weights_of(world, args.experts_per_token)
        return split_by_weight(world.num_layers, weights, pipeline_of(world))
    return split_by_places(world.num_layers, places, world.pp * world.vpp)


@ms.condition(
    "a no-op position in layers={args.layers} is too large: the maximum is {world.num_layers} layers + number of no-ops - 1",
    fix=(ms.Fix.give_setting("layers", note="positions up to layers + no-ops - 1"), ms.Fix.give_setting("layers", "auto")),
    when=_has_places,
)
def places_exist(args: NoopLayersArgs, world: ms.World) -> bool:
    """Check that every empty place is a place."""
    places = places_of(args.layers) or ()
    return bool(max(places, default=0) < world.num_layers + len(places))


@ms.condition(
    "{world.num_layers} layers plus no-ops at positions {args.layers} cannot be split evenly into pp x vpp = {world.pp} x "
    "{world.vpp} model chunks",
    fix=(
        ms.Fix.give_setting("layers", "auto"),
        ms.Fix.give_setting("layers", note="layers plus no-ops must be a multiple of pp x vpp"),
    ),
    when=_has_places,
)
def places_fill_chunks(args: NoopLayersArgs, world: ms.World) -> bool:
    """Check that layers and empty places together are equal shares of the chunks."""
    return bool((world.num_layers + len(places_of(args.layers) or ())) % (world.pp * world.vpp) == 0)


class NoopLayers(ms.Feature[NoopLayersArgs]):
    """Balance pipeline stages by uneven layer counts.

    Stages with additional work, such as the stage with the output layer or multi-token prediction, get fewer layers.
    """

    spec = ms.FeatureSpec(
        name="noop-layers",
        category=ms.Category.PARALLEL,
        constraints=(
            ms.Requires("pipeline-parallel", reason="noop-layers assigns layers to pipeline stages"),
            has_stages,
            layers_have_no_pattern,
            places_exist,
            places_fill_chunks,
            ms.ModelCondition(
                "mindspeed.features.noop_layers.feature:missing_layout",
                "the sizes of the model are known, so that layers can be assigned to stages",
                subject="spec",
                fix=(ms.Fix.advise("give --num-layers and the other model sizes"), ms.Fix.remove_feature()),
            ),
        ),
        numerics=ms.Numerics.reordered(reason="two stages sum the gradient of tied embeddings, so the summation order differs"),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
        verify_with=ms.VerifyWith(
            world={"pp": 2, "vpp": 2, "num_layers": 3, "num_query_groups": 4}, settings={"noop-layers": {"layers": (1,)}}
        ),
        own_trainer="it skips layers of Megatron's transformer block; a list of your own modules needs no placeholder",
    )

    @ms.hookimpl
    def layer_split(self) -> tuple[int, ...]:
        return split_of(self.args, self.world)

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        try:
            counts = split_of(self.args, self.world)
        except ms.UnknownValue:
            return []
        text = f"gives each model chunk its number of layers: {', '.join(map(str, counts))}"
        try:
            weights = weights_of(self.world, self.args.experts_per_token)
            shares = ", ".join(f"{share:.3f}" for share in chunk_shares(counts, weights))
            text += f". Relative FLOPs of each chunk (1.000 = mean of all chunks): {shares}"
            largest = imbalance(counts, weights, pipeline_of(self.world))
            text += f". Relative FLOPs of the largest stage (1.000 = balanced): {largest:.3f}"
        except ms.UnknownValue as unknown:
            text += f". FLOPs of the stages are unknown because {unknown.field} is not set"
        return [ms.ArgOverride("pipeline_model_parallel_layout", layout_text(counts, mtp_layers(self.world)), text)]
