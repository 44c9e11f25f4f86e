"""Every place in Megatron that a feature, the base plan or a seam may patch: asked of the features, nothing is applied.

What a feature patches may depend on its settings, on sizes and on the platform. It is asked with its defaults, with
every choice of one setting at a time, for a small dense and a large MoE model, on every platform that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ValidationError

from mindspeed.inspection.contracts import part_of
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.plugins.feature import Feature, FeatureArgs
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.patches import Patch, Wrap
from mindspeed.plugins.world import PARALLEL_SIZES, PLATFORMS, World

_MODEL: Final = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 256,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 64,
}
_DENSE: Final = {
    **_MODEL,
    "world_size": 1,
    "num_experts": 0,
    "grouped_experts": False,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
}
_LARGE: Final = {
    **_MODEL,
    **dict.fromkeys(PARALLEL_SIZES, 2),
    "world_size": 64,
    "num_experts": 4,
    "grouped_experts": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
}
_WORLDS: Final = (
    {**_DENSE, "activation": "gelu", "rotary": False, "dtype": "fp32"},
    {**_LARGE, "activation": "silu", "rotary": True, "dtype": "bf16"},
)


_LAUNCH_PATH: Final = (
    "megatron.training.arguments:add_megatron_arguments",
    "megatron.training.arguments:parse_args",
    "megatron.training.arguments:validate_args",
    "megatron.training.arguments:core_transformer_config_from_args",
    "megatron.training.initialize:initialize_megatron",
    "megatron.training.training:pretrain",
    "megatron.training.training:setup_model_and_optimizer",
    "megatron.training.training:train",
    "megatron.training.training:train_step",
    "megatron.training.checkpointing:save_checkpoint",
    "megatron.training.checkpointing:load_checkpoint",
    "pretrain_gpt:get_batch",
    "pretrain_gpt:loss_func",
    "pretrain_gpt:forward_step",
    "pretrain_gpt:train_valid_test_datasets_provider",
)
"""What a job that starts with Megatron-LM's own script passes through, patched or not."""


@dataclass(frozen=True, slots=True)
class Target:
    """One place that one owner may patch. ``guards`` are the Megatron versions it is patched on; none means all."""

    feature: str
    distribution: str
    target: str
    guards: tuple[str, ...] = ()


def megatron_targets(catalog: Catalog) -> list[Target]:
    """Every target in Megatron, by feature and name. Targets elsewhere (torch, our own modules) are no Megatron's."""
    guards: dict[tuple[str, str, str], set[str | None]] = {("megatron-lm", BUILT_IN, target): {None} for target in _LAUNCH_PATH}
    for owner, distribution, patch in _every_patch(catalog):
        for target in (patch.target, *patch.clears):
            if part_of(target) is not None:
                guard = patch.when.megatron if patch.when is not None else None
                guards.setdefault((owner, distribution, target), set()).add(guard)
    return [
        Target(*names, tuple(sorted(map(str, given))) if None not in given else ()) for names, given in sorted(guards.items())
    ]


def _every_patch(catalog: Catalog) -> Iterator[tuple[str, str, Patch]]:
    from mindspeed.platforms import base_features

    base = {feature for platform in PLATFORMS for feature in base_features(platform)}
    for feature in sorted(base, key=lambda one: one.spec.name):
        yield from ((feature.spec.name, BUILT_IN, patch) for patch in _patches_of(feature))
    yield from (("megatron-seams", BUILT_IN, patch) for patch in _seams())
    for found in catalog.usable.values():
        if found.feature is not None:
            yield from ((found.name, found.distribution, patch) for patch in _patches_of(found.feature))


def _seams() -> Iterator[Patch]:
    """Every patch among the constants of the modules that declare seams, whichever of them a plan may need."""
    from mindspeed.inspection.config_arguments import PLACES
    from mindspeed.megatron import hook_points, run_phases

    for module in (hook_points, run_phases):
        for value in vars(module).values():
            yield from _patches_in(value)
    yield from (Wrap(place.target, "mindspeed.megatron.argument_overrides:override_fields", place.name) for place in PLACES)


def _patches_in(value: Any) -> Iterator[Patch]:
    if isinstance(value, Patch):
        yield value
    elif isinstance(value, dict | tuple | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _patches_in(inner)


def _patches_of(feature: type[Feature[Any]]) -> Iterator[Patch]:
    for platform in sorted(feature.spec.platforms or PLATFORMS):
        for world in _WORLDS:
            for args in _choices(feature.Args):
                manager = FeatureManager([feature(args, World({**world, "platform": platform}))])
                yield from (patch for _, given in manager.call("patches") for patch in given)


def _choices(model: type[FeatureArgs]) -> Iterator[FeatureArgs]:
    """The defaults, and every model in which one field has another value; fields without a default get their first."""
    fields = {name: list(_values(field.annotation)) for name, field in model.model_fields.items()}
    needed = {name: fields[name][0] for name, field in model.model_fields.items() if field.is_required() and fields[name]}
    changes: list[dict[str, Any]] = [{}, *({name: value} for name, values in fields.items() for value in values)]
    for change in changes:
        try:
            yield model(**{**needed, **change})
        except ValidationError:
            continue  # not every text and number is a value of the field


def _values(annotation: Any) -> Iterable[Any]:
    origin = get_origin(annotation)
    if annotation is bool:
        return (True, False)
    if annotation in (int, float):
        return (1, 2, 4)
    if annotation is str:
        return ("text", "")
    if origin is Literal:
        return get_args(annotation)
    if origin in (tuple, list, set, frozenset):
        return [(value,) for inner in get_args(annotation)[:1] for value in _values(inner)]
    return [value for inner in get_args(annotation) for value in _values(inner)]
