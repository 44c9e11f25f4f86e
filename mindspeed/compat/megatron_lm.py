"""Old features under Megatron-LM's own parser: it takes their arguments, and they see what it makes of all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed.compat.arguments import process_args
from mindspeed.compat.manager import MindSpeedFeaturesManager, old_features
from mindspeed.engine.inspection.source import find_module
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Stability, Wrap, hookimpl

_ARGUMENTS = "megatron.training.arguments"


class MegatronArguments(Feature[FeatureArgs]):
    """Show Megatron-LM's arguments to old features, and their arguments to its parser."""

    spec = FeatureSpec(
        name="compat:arguments",
        category=Category.SCENARIO,
        level=0,
        stability=Stability.EXPERIMENTAL,
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        takes = "adds the arguments of old features to Megatron-LM's parser"
        shows = "lets old features check the arguments before and after Megatron-LM validates them"
        return [
            Wrap(f"{_ARGUMENTS}:parse_args", f"{__name__}:with_arguments_of_features", takes, phase="setup"),
            Wrap(f"{_ARGUMENTS}:validate_args", f"{__name__}:with_validation_of_features", shows, phase="setup"),
        ]


def wires_arguments() -> bool:
    """Return whether there are old features, and a Megatron-LM whose parser must know them."""
    return bool(old_features()) and find_module(_ARGUMENTS) is not None


def with_arguments_of_features(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``parse_args(extra_args_provider, ...)``: the script's arguments first, then those that are missing."""

    @functools.wraps(original)
    def parse_args(extra_args_provider: Callable[[Any], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        def provide(parser: Any) -> Any:
            return process_args(extra_args_provider(parser) if extra_args_provider is not None else parser)

        return original(provide, *args, **kwargs)

    return parse_args


def with_validation_of_features(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``validate_args(args, ...)``."""

    @functools.wraps(original)
    def validate_args(args: Any, *others: Any, **kwargs: Any) -> Any:
        MindSpeedFeaturesManager.pre_validate_features_args(args)
        result = original(args, *others, **kwargs)
        MindSpeedFeaturesManager.validate_features_args(args)
        MindSpeedFeaturesManager.post_validate_features_args(args)
        return result

    return validate_args
