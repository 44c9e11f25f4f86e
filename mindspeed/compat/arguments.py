"""Arguments in MindSpeed's form: one namespace with what old features register, what the command line gives, and Megatron's."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from mindspeed import registry
from mindspeed.compat.feature import MindSpeedFeature
from mindspeed.compat.old_flags.flags import OLD_FLAGS
from mindspeed.engine.runtime import session
from mindspeed.job.megatron_arguments import world_of as derived_world
from mindspeed.job.world import FIELDS, PARALLEL_SIZES, World
from mindspeed.megatron_lm.argument_layers import declared_flags

MEGATRON_SIZES: Final = {
    field.arguments[0]: name
    for name, field in FIELDS.items()
    if field.as_it_stands and (not field.has_default or name in PARALLEL_SIZES)
} | {
    "ffn_hidden_size": "ffn_hidden_size",
    "virtual_pipeline_model_parallel_size": "vpp",
    "world_size": "world_size",
    "num_query_groups": "num_query_groups",
    "num_experts": "num_experts",
    "swiglu": "gated_linear_unit",
}
"""Megatron's arguments that are values of a world as they stand, by name."""

_HOLDER: Final = "mindspeed.args_utils"
"""The old module whose ``_MINDSPEED_ARGS`` holds the namespace, which consumers also write."""

_LAYERS: Final = "transformer_engine_layers"

_of_plan: Final[dict[str, Any]] = {}
"""Arguments that stand for features of the plan that was active when the command line was read."""


def process_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of every feature in the list, and ``--optimization-level``; returns the parser."""
    from mindspeed.compat.manager import MindSpeedFeaturesManager

    if "--optimization-level" not in parser._option_string_actions:
        levels = "0 = unmodified Megatron, 1 = fused operators, 2 = also all requested features"
        parser.add_argument("--optimization-level", type=int, choices=(0, 1, 2), default=2, help=levels)
    for feature in MindSpeedFeaturesManager.FEATURES_LIST:
        register(feature, parser)
    return parser


def register(feature: MindSpeedFeature, parser: argparse.ArgumentParser) -> None:
    """Let a feature add its arguments, unless the parser has them all. One that fails to is a broken row of the catalog."""
    from mindspeed.compat.adapter import own_arguments

    actions = own_arguments(feature)
    holders: list[Any] = [parser, *parser._action_groups]
    handlers = [holder.conflict_handler for holder in holders]
    for holder in holders:
        holder.conflict_handler = "resolve"  # a class that derives from one of MindSpeed's may register a flag anew
    options = {option for action in actions for option in action.option_strings}
    if not options <= parser._option_string_actions.keys():
        feature.register_args(parser)
    elif not options:  # it may add a choice to an argument of another
        with suppress(Exception):
            feature.register_args(parser)
    for holder, handler in zip(holders, handlers, strict=True):
        holder.conflict_handler = handler


def get_mindspeed_args(get_defaults: bool = False) -> Namespace:
    """The command line as MindSpeed reads it: arguments of features by their parsers, all others by their look.

    ``--name value`` of another parser becomes the attribute ``name``, with numbers as numbers; without a value it is
    True. ``get_defaults`` gives the defaults alone and remembers nothing.
    """
    if get_defaults:
        return _parse(())
    holder: Any = import_module(_HOLDER)
    if holder._MINDSPEED_ARGS is None:
        holder._MINDSPEED_ARGS = _as_active(_parse(sys.argv[1:]))
    args: Namespace = holder._MINDSPEED_ARGS
    return args


def get_full_args() -> Namespace:
    """Megatron's own arguments once it has them, before that `get_mindspeed_args`."""
    variables = sys.modules.get("megatron.training.global_vars")
    args: Namespace | None = getattr(variables, "_GLOBAL_ARGS", None)
    return args if args is not None else get_mindspeed_args()


def is_of_plan(dest: str, value: Any) -> bool:
    """Return whether an argument has its value from the plan that was active, not from the user."""
    return dest in _of_plan and _of_plan[dest] == value


def _as_active(args: Namespace) -> Namespace:
    """Add what the active plan knows: its flags may have been removed from the command line when it was made."""
    active = session.current()
    _of_plan.clear()
    if active is None:
        return args
    features = {feature.name: feature.args for feature in active.plan.features}
    for old in OLD_FLAGS:
        feature = next((name for name in old.features if name in features), None)
        if feature is None or old.noop_reason:
            continue
        value: Any = next((value for value, name in old.choices.items() if name == feature and not old.chooser), True)
        if old.setting:
            value = features[feature].get(old.setting)
        if value is not None and not getattr(args, old.dest, None):
            setattr(args, old.dest, value)
            _of_plan[old.dest] = value
    world = active.plan.world
    given = set(world.known()) - assumed_world(world)
    for name, field in MEGATRON_SIZES.items():
        if field in given and not hasattr(args, name):
            setattr(args, name, getattr(world, field))
    return args


def _parse(argv: Sequence[str]) -> Namespace:
    parser = process_args(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    args, others = parser.parse_known_args(argv)
    for name, value in _parse_unknown(others).items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


def _parse_unknown(tokens: Sequence[str]) -> dict[str, Any]:
    """Arguments that no parser here knows: ``--a 1 --b --c=x y`` -> ``{"a": 1, "b": True, "c": ["x", "y"]}``."""
    found: dict[str, list[Any]] = {}
    values: list[Any] | None = None
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            values = found[name.replace("-", "_")] = [_scalar(value)] if equals else []
        elif values is not None:
            values.append(_scalar(token))
    return {name: True if not given else given[0] if len(given) == 1 else given for name, given in found.items()}


def _scalar(text: str) -> int | float | str:
    if text[:1] in "+-.0123456789":
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
    return text


def namespace_of(world: World, given: Mapping[str, Any], unknown_is_absent: bool = False) -> Namespace:
    """The arguments of a plan in MindSpeed's form: Megatron's defaults, the world's sizes, then ``given``.

    Sizes that nobody gave are None, or absent.
    """
    from mindspeed.engine.inspection.cli_arguments import surface

    recorded = surface(world.megatron) if world.knows("megatron") else None
    values = {argument.dest: argument.default for argument in (recorded.arguments if recorded is not None else ())}
    values |= vars(get_mindspeed_args(get_defaults=True))
    values |= {name: getattr(world, field) for name, field in MEGATRON_SIZES.items() if world.knows(field)}
    if unknown_is_absent:
        for name, field in MEGATRON_SIZES.items():
            if not world.knows(field):
                values.pop(name, None)
    if world.knows("dtype"):
        values |= {"bf16": world.dtype == "bf16", "fp16": world.dtype == "fp16"}
    return Namespace(**values | dict(given))


def assumed_world(world: World) -> set[str]:
    """Return the fields of a world that only repeat defaults of Megatron-LM's parser.

    A command line that does not say how many layers there are is not Megatron-LM's: a framework makes the model, with
    arguments of its own. Its specs are those of Transformer Engine, as with MindSpeed, unless an argument says otherwise.
    """
    from mindspeed.engine.inspection.cli_arguments import surface

    recorded = surface(world.megatron) if world.knows("megatron") else None
    if world.knows("num_layers") or recorded is None:
        return set()
    defaults = derived_world({name: rows[0].default for name, rows in recorded.by_dest.items()})
    known = world.known()
    return {field for field, (value, _) in defaults.items() if known.get(field) == value} - {_LAYERS}


def world_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The world's values among arguments in Megatron's names, without values of another type."""
    world = {field: args[name] for name, field in MEGATRON_SIZES.items() if type(args.get(name)) is FIELDS[field].kind}
    if args.get("bf16") is True or args.get("fp16") is True:
        world["dtype"] = "bf16" if args.get("bf16") is True else "fp16"
    if args.get("swiglu") is True:
        world["activation"] = "silu"
    if type(args.get("moe_expert_capacity_factor")) is float:
        world["expert_capacity_factor"] = args["moe_expert_capacity_factor"]
    if type(args.get("transformer_impl")) is str:
        world[_LAYERS] = args["transformer_impl"] != "local"
    if not args.get("group_query_attention"):
        world.pop("num_query_groups", None)  # Megatron's default of 1 means nothing then
    return world


def megatron_features(args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Features that Megatron's own arguments switch on, with the settings that stand among them."""
    declared = list(declared_flags(registry.catalog_for(())))
    switches = ((name, flag) for name, flag in declared if flag.switch == "on" and not flag.is_choice)
    settings: dict[str, dict[str, Any]] = {name: {} for name, flag in switches if args.get(flag.dest)}
    for name, flag in declared:
        if flag.setting and name in settings and args.get(flag.dest) is not None:
            settings[name][flag.setting] = args[flag.dest]
    return settings
