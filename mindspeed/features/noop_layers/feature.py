"""Chunks of a pipeline with different numbers of layers, through Megatron's own layout."""

from __future__ import annotations

from typing import Any

from mindspeed.features.noop_layers.balance import (
    chunk_shares,
    imbalance,
    layout_text,
    mtp_layers,
    split_by_places,
    split_by_weight,
    weights_of,
)
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    RemoveFeature,
    Requires,
    UnknownValue,
    VerifyWith,
    World,
    hookimpl,
)


class NoopLayersArgs(FeatureArgs):
    layers: int | tuple[int, ...] | str = Field(
        "auto", description="places that stay empty, counted from 0 over all places; auto: the heaviest stage is lightest"
    )
    experts_per_token: int = Field(2, ge=1, description="auto: experts that compute a token in a MoE layer (top-k)")


def places_of(args: NoopLayersArgs) -> tuple[int, ...] | None:
    """Return the places that a setting names, one number, several, or the text ``0,7``; None for what names none."""
    layers = args.layers
    parts = layers.split(",") if isinstance(layers, str) else layers if isinstance(layers, tuple) else (layers,)
    texts = [str(part).strip() for part in parts]
    return tuple(map(int, texts)) if all(text.isdigit() for text in texts) else None


def _listing(args: NoopLayersArgs) -> tuple[int, ...]:
    return places_of(args) or ()


def _all_places(args: NoopLayersArgs, world: World) -> int:
    return int(world.num_layers) + len(_listing(args))


def _has_places(args: NoopLayersArgs, world: World) -> bool:
    return places_of(args) is not None


def split_of(args: NoopLayersArgs, world: World) -> tuple[int, ...]:
    """Return the layers of each chunk in the order of the model."""
    places = places_of(args)
    if places is None:
        weights = weights_of(world, args.experts_per_token)
        return split_by_weight(world.num_layers, weights, world.pp, world.vpp)
    return split_by_places(world.num_layers, places, world.pp * world.vpp)


class NoopLayers(Feature[NoopLayersArgs]):
    """Deal the layers of the model out unevenly, so that no stage waits for one with more work."""

    spec = FeatureSpec(
        name="noop-layers",
        summary="Pipeline stages with fewer layers where embedding, output layer or multi-token prediction take their time",
        category=Category.PARALLEL,
        constraints=(
            Requires("pipeline-parallel", reason="it deals layers out to its stages"),
            Check(
                lambda args, world: world.pp > 1,
                "one stage has every layer, and there is {world.pp}",
                fix=(GiveField("pp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: args.layers == "auto" or places_of(args) is not None,
                "the empty places {args.layers} are not whole numbers from 0 on, joined by commas, and not auto",
                fix="--set noop-layers.layers=auto",
            ),
            Check(
                lambda args, world: len(set(_listing(args))) == len(_listing(args)),
                "a place is named twice in {args.layers}",
                fix="--set noop-layers.layers with each place once",
                when=_has_places,
            ),
            Check(
                lambda args, world: max(_listing(args), default=0) < _all_places(args, world),
                "places {args.layers} are not all among those of {world.num_layers} layers and the empty ones, counted from 0",
                fix="--set noop-layers.layers with smaller numbers",
                when=_has_places,
            ),
            Check(
                lambda args, world: _all_places(args, world) % (world.pp * world.vpp) == 0,
                "{world.num_layers} layers and the empty places {args.layers} cannot be split evenly over "
                "pp x vpp = {world.pp} x {world.vpp} chunks",
                fix="--set noop-layers.layers=auto, or a number of places that fills up every chunk",
                when=_has_places,
            ),
        ),
        layer_split=split_of,
        numerics=Numerics.reordered(reason="as pipeline-parallel"),
        state=CheckpointState("resharded", "layers are saved under their number in the whole model, empty places nowhere"),
        verify_with=VerifyWith(
            world={"pp": 2, "vpp": 2, "num_layers": 3, "num_query_groups": 4}, settings={"noop-layers": {"layers": (1,)}}
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        try:
            counts = split_of(self.args, self.world)
        except UnknownValue:
            return []
        text = f"layers per chunk {', '.join(map(str, counts))}"
        try:
            weights = weights_of(self.world, self.args.experts_per_token)
            shares = ",".join(f"{share:.3f}" for share in chunk_shares(counts, weights))
            text += f"; weights of the chunks {shares}"
            text += f"; the heaviest stage has {imbalance(counts, weights, self.world.pp):.3f} of the mean FLOPs"
        except UnknownValue as unknown:
            text += f"; FLOPs of the stages are not known without {unknown.field}"
        return [ArgOverride("pipeline_model_parallel_layout", layout_text(counts, mtp_layers(self.world)), text)]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if config.pipeline_model_parallel_layout is None:
            self.decline("the plan was made without the shape of the model", fix="give --num-layers and the sizes of the model")
