"""Every place in Megatron that a feature, the base plan or a hook point may patch: read from declarations, nothing is
applied.

What a feature patches may depend on its settings, on sizes and on the platform. It is asked with its defaults, with
every choice of one setting at a time, for a small dense and a large MoE model, on every platform that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ValidationError

from mindspeed.engine.inspection.contracts import part_of
from mindspeed.job.world import PARALLEL_SIZES, PLATFORMS, World
from mindspeed.plugins import Feature, FeatureArgs, Patch, Wrap
from mindspeed.plugins.answers import answer, implements
from mindspeed.plugins.discovery import BUILT_IN, Catalog

_SIZES: Final = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 256, "vocab_size": 256, "seq_length": 64}
_MODEL: Final = {**_SIZES, "num_attention_heads": 8, "num_query_groups": 4, "micro_batch_size": 1, "global_batch_size": 64}
_DENSE: Final = {**_MODEL, "normalization": "LayerNorm", "activation": "gelu", "rotary": False, "dtype": "fp32"}
_LARGE: Final = {**_MODEL, "normalization": "RMSNorm", "activation": "silu", "rotary": True, "dtype": "bf16"}
_WORLDS: Final = (
    {**_DENSE, "gated_linear_unit": False, "num_experts": 0, "grouped_experts": False, "world_size": 1},
    {
        **_LARGE,
        **dict.fromkeys(PARALLEL_SIZES, 2),
        "gated_linear_unit": True,
        "num_experts": 4,
        "grouped_experts": True,
        "world_size": 64,
    },
)

_LAUNCH_PATH: Final = {
    "megatron.training.arguments": "add_megatron_arguments parse_args validate_args core_transformer_config_from_args",
    "megatron.training.initialize": "initialize_megatron",
    "megatron.training.training": "pretrain setup_model_and_optimizer train train_step",
    "megatron.training.checkpointing": "save_checkpoint load_checkpoint",
    "pretrain_gpt": "get_batch loss_func forward_step train_valid_test_datasets_provider",
}
"""Functions that a job of Megatron-LM's own script calls, patched or not."""


@dataclass(frozen=True, slots=True)
class PatchTarget:
    """Describe a place that an owner may patch. ``guards`` are the Megatron versions it is patched on; none means all.

    ``by_name``: every patch of it is a wrap that does not mind where a new optional parameter stands.
    """

    feature: str
    distribution: str
    target: str
    guards: tuple[str, ...] = ()
    by_name: bool = False


def megatron_targets(
    catalog: Catalog, base: Iterable[type[Feature[Any]]], hook_patches: Iterable[tuple[str, Patch]]
) -> list[PatchTarget]:
    """List every target in Megatron, by feature and name. Targets elsewhere (torch, our own modules) are no Megatron's.

    ``base`` are the level-0 features of all platforms, ``hook_patches`` the ``(owner, patch)`` pairs of the hook points.
    """
    guards: dict[tuple[str, str, str], set[str | None]] = {
        ("megatron-lm", BUILT_IN, f"{module}:{name}"): {None}
        for module, names in _LAUNCH_PATH.items()
        for name in names.split()
    }
    patches = [(feature.spec.name, BUILT_IN, patch) for feature in set(base) for patch in _patches_of(feature)]
    patches += [(owner, BUILT_IN, patch) for owner, patch in hook_patches]
    for name, found in catalog.usable.items():
        patches += [(name, found.distribution, patch) for patch in _patches_of(catalog.feature(name))]
    ranges = {name: catalog.specs[name].megatron for name in catalog.usable}
    positional: set[tuple[str, str, str]] = set()
    for owner, distribution, patch in patches:
        if not (isinstance(patch, Wrap) and patch.by_name):
            positional.add((owner, distribution, patch.target))
        for target in (patch.target, *patch.clears):
            if part_of(target) is not None:
                given = [patch.when.megatron if patch.when is not None else None, ranges.get(owner)]
                guards.setdefault((owner, distribution, target), set()).add(",".join(filter(None, given)) or None)
    positional |= {names for names in guards if names[0] == "megatron-lm"}
    return [
        PatchTarget(*names, tuple(sorted(map(str, given))) if None not in given else (), names not in positional)
        for names, given in sorted(guards.items())
    ]


def _patches_of(feature: type[Feature[Any]]) -> Iterator[Patch]:
    if not implements(feature, "patches"):
        return
    choices = list(_choices(feature.Args))
    for platform in sorted(feature.spec.platforms or PLATFORMS):
        for sizes in _WORLDS:
            world = World({**sizes, "platform": platform})
            if not feature.spec.is_idle(world):
                yield from (patch for args in choices for patch in answer(feature, "patches", args, world))


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
