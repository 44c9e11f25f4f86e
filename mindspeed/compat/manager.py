"""``MindSpeedFeaturesManager``: the list of features in MindSpeed's form, and the steps that a consumer takes with it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any, ClassVar, cast

from mindspeed.compat.adapter import adapt, is_switch, name_of, own_arguments, refusal_of
from mindspeed.compat.feature import MindSpeedFeature, OwnFeature, known_names
from mindspeed.compat.feature import create_features_list as own_features
from mindspeed.compat.registrations import Registration
from mindspeed.plugins.discovery import DiscoveredFeature
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.found import declared_at
from mindspeed.problems import Fix, MindSpeedError, Problem


class MindSpeedFeaturesManager:
    """The one list of features in this process. A consumer may replace it; ours are in it as objects of the same form."""

    FEATURES_LIST: ClassVar[list[MindSpeedFeature]] = own_features()

    @classmethod
    def set_features_list(cls, features_list: Sequence[MindSpeedFeature]) -> None:
        """Replace the content of the list; everybody who holds the list sees it."""
        cls.FEATURES_LIST[:] = list(features_list)

    @classmethod
    def create_features_list(cls) -> list[MindSpeedFeature]:
        """A new list of the features of this framework that have old flags."""
        return own_features()

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        """Add the arguments of every feature to a parser, and none twice."""
        from mindspeed.compat.arguments import process_args

        process_args(parser)

    @classmethod
    def apply_features_pre_patches(cls, args: Namespace) -> None:
        """Do nothing: patches of modules that are imported already reach every holder anyway."""

    @classmethod
    def apply_features_patches(cls, args: Namespace) -> None:
        """Plan the features that ``args`` switches on, in addition to the active ones, and activate them."""
        from mindspeed.compat import activation

        activation.replan(args)

    @classmethod
    def remove_patches(cls) -> None:
        """Undo the patches of features and of `MindSpeedPatchesManager`; applying the features again puts them back."""
        from mindspeed.compat.patches import MindSpeedPatchesManager

        MindSpeedPatchesManager.remove_patches()

    @classmethod
    def pre_validate_features_args(cls, args: Namespace) -> None:
        """Let every feature look at the arguments before Megatron does."""
        cls._validate("pre_validate_args", args)

    @classmethod
    def validate_features_args(cls, args: Namespace) -> None:
        """Let every feature refuse the arguments. Raises one MindSpeedError with the refusals of all."""
        cls._validate("validate_args", args)

    @classmethod
    def post_validate_features_args(cls, args: Namespace) -> None:
        """Let every feature look at the arguments after Megatron has."""
        cls._validate("post_validate_args", args)

    @classmethod
    def _validate(cls, step: str, args: Namespace) -> None:
        problems: list[Problem] = []
        for feature in cls.FEATURES_LIST:
            try:
                getattr(feature, step)(args)
            except MindSpeedError as error:
                problems += error.problems
            except Exception as error:  # features refuse with whatever error they like
                text = f"{name_of(feature)}: {refusal_of(error)}"
                fix = Fix.remove_feature(name_of(feature))
                problems.append(Problem("MS304", text, (name_of(feature),), where=where_of(feature), fix=fix))
        if problems:
            raise MindSpeedError(problems)


def old_features() -> list[MindSpeedFeature]:
    """The features of the list that are written in MindSpeed's form."""
    listed = MindSpeedFeaturesManager.FEATURES_LIST
    return [feature for feature in listed if not isinstance(feature, OwnFeature) or feature.is_extended]


def found_rows(common: Namespace | None, force_overridden: frozenset[Registration] = frozenset()) -> list[DiscoveredFeature]:
    """The old features of the list as rows of the catalog, in order; a wrong one is a row with its problem."""
    rows: list[DiscoveredFeature] = []
    before: list[str] = []
    for feature in old_features():
        name, (distribution, version) = name_of(feature), origin(feature)
        row = DiscoveredFeature(name, distribution, version, f"{type(feature).__module__}:{type(feature).__qualname__}")
        try:
            row = replace(row, feature=adapt(feature, tuple(before), lambda: common, force_overridden))
        except Exception as error:  # foreign code may fail in any way; it must not take the others with it
            text = f"feature {name} cannot be read: {type(error).__name__}: {error}"
            fix = Fix.advise("correct the feature class")
            row = replace(row, problem=Problem("MS101", text, (name,), where=row.where, fix=fix))
        rows.append(row)
        before.append(name)
    return rows


def origin(feature: MindSpeedFeature) -> tuple[str, str]:
    """Distribution and version that a feature comes from; the package's name where it is not installed."""
    package = type(feature).__module__.partition(".")[0]
    for distribution in _distributions().get(package, []):
        return distribution, metadata.version(distribution)
    return package, "not installed"


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of each package; to read them takes a tenth of a second."""
    return metadata.packages_distributions()


def where_of(feature: MindSpeedFeature) -> str:
    """``package/module.py:line`` of a feature's class."""
    return declared_at(cast("type[Feature[Any]]", type(feature)))


def never_on(feature: MindSpeedFeature) -> str:
    """Give the reason why no argument can switch a feature on, or ''. Such a feature can only be requested by name."""
    kind = type(feature)
    if feature.default_patches or kind.is_need_apply is not MindSpeedFeature.is_need_apply:
        return ""
    options = {action.dest: action.option_strings[0] for action in own_arguments(feature)}
    if feature.feature_name in options or feature.feature_name in known_names() - {feature.feature_name}:
        return ""
    others = f", it registers {' and '.join(options.values())}" if options else ", it registers no argument"
    return f"no argument switches it on: --{feature.feature_name.replace('_', '-')} does not exist{others}"


def given_arguments(feature: MindSpeedFeature, values: Mapping[str, Any]) -> dict[str, Any]:
    """The feature's own arguments that have another value than their default, without its switch."""
    own = [action for action in own_arguments(feature) if action.dest in values and not is_switch(feature, action)]
    return {action.dest: values[action.dest] for action in own if values[action.dest] != action.default}
