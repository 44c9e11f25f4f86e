"""``MindSpeedFeature``: the base class that features written for MindSpeed derive from."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from mindspeed.compat.old_flags.flags import BY_DEST, OLD_FLAGS, register_old_flags
from mindspeed.plugins.feature import Feature
from mindspeed.problems import Fix, MindSpeedError, Problem, advice, near_names, suggestion


class MindSpeedFeature:
    """A feature in MindSpeed's form. Override what you need; patches go through the framework's engine.

    ``feature_name`` is the name with underscores, which is also the argument that switches the feature on. A feature of
    ``optimization_level`` 0 is always on (``default_patches``), others up to the level of the job.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.strip().lower().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def register_args(self, parser: ArgumentParser) -> None:
        """Add the feature's arguments."""

    def pre_validate_args(self, args: Namespace) -> None:
        """Change arguments before Megatron validates them."""

    def validate_args(self, args: Namespace) -> None:
        """Raise when arguments do not fit."""

    def post_validate_args(self, args: Namespace) -> None:
        """Change arguments after Megatron has validated them."""

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register patches that must be known before others import Megatron; here all patches are."""

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register patches: ``patch_manager.register_patch("megatron.core.a.b", new)``."""

    def is_need_apply(self, args: Namespace) -> bool:
        """Return whether these arguments switch the feature on."""
        level = getattr(args, "optimization_level", 2)
        return self.default_patches or (self.optimization_level <= level and bool(getattr(args, self.feature_name, None)))

    def incompatible_check(self, global_args: Namespace, check_args: str) -> None:
        """Raise MS202 when both this feature and the argument or feature ``check_args`` are on, MS110 when it is unknown."""
        if self._is_on(global_args, check_args, "excludes"):
            names = (self.feature_name, check_args)
            fix = tuple(map(Fix.remove_feature, names))
            raise MindSpeedError([Problem("MS202", f"{names[0]} and {names[1]} conflict", names, fix=fix)])

    def dependency_check(self, global_args: Namespace, check_args: str) -> None:
        """Raise MS205 when this feature is on without the argument or feature ``check_args``, MS110 when it does not exist."""
        if self._is_on(global_args, check_args, "requires") is False:
            text = f"the feature {self.feature_name} requires {check_args}, which is not active"
            fix = (Fix.give_option(f"--{check_args.replace('_', '-')}"), Fix.remove_feature(self.feature_name))
            raise MindSpeedError([Problem("MS205", text, (self.feature_name,), fix=fix)])

    def _is_on(self, args: Namespace, name: str, verb: str) -> bool | None:
        """Return whether ``name`` is on beside this feature; None when this feature itself is off. Raises MS110."""
        dest = name.replace("-", "_")
        if not hasattr(args, dest) and dest not in (known := known_names()):
            what = "which is neither a feature nor an argument of Megatron or of any feature"
            text = f"{self.feature_name} {verb} {name}, {what}"
            fix = suggestion(near_names(dest, sorted(known), cutoff=0.6), "use the name of an existing feature or argument")
            raise MindSpeedError([Problem("MS110", text, (self.feature_name,), fix=advice(fix))])
        return bool(getattr(args, dest, None)) if getattr(args, self.feature_name, None) else None

    @staticmethod
    def add_parser_argument_choices_value(parser: ArgumentParser, argument_name: str, new_choice: Any) -> None:
        """Add a choice to an argument that is registered already; nothing happens when it is not."""
        action = parser._option_string_actions.get(argument_name)
        if action is not None and action.choices is not None and new_choice not in action.choices:
            action.choices = [*action.choices, new_choice]

    @classmethod
    def as_mindspeed_feature(cls) -> type[Feature[Any]]:
        """The class as a feature of the framework; discovery uses it when an entry point names this class."""
        from mindspeed.compat.adapter import adapt

        return adapt(cls())  # type: ignore[call-arg]


class OwnFeature(MindSpeedFeature):
    """Features of this framework in MindSpeed's list, mostly one: they have old flags, and no patches to register."""

    names: tuple[str, ...]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.names = (name,)

    def register_args(self, parser: ArgumentParser) -> None:
        for name in self.names:
            register_old_flags(parser, name)

    def is_need_apply(self, args: Namespace) -> bool:
        return not switched_on(vars(args)).isdisjoint(self.names)

    @property
    def is_extended(self) -> bool:
        """Return whether a class of another package derives from this one and registers patches, or validates arguments."""
        steps = ("pre_register_patches", "register_patches", "pre_validate_args", "validate_args", "post_validate_args")
        return any(getattr(type(self), step) is not getattr(MindSpeedFeature, step) for step in steps)


def switched_on(values: Mapping[str, Any]) -> set[str]:
    """Features that old flags, by attribute, switch on."""
    given = [old for dest, old in BY_DEST.items() if old.switch and values.get(dest) not in (None, False)]
    return {old.feature_for(values[old.dest], values) for old in given} - {""}


def create_features_list() -> list[MindSpeedFeature]:
    """A new list with every feature that has old flags."""
    names = dict.fromkeys(name for old in OLD_FLAGS for name in old.features)
    return [OwnFeature(name) for name in names]


def known_names() -> set[str]:
    """Every name that an argument or a feature has here, with underscores: of features, old flags and Megatron."""
    from mindspeed.compat.adapter import own_arguments
    from mindspeed.compat.manager import MindSpeedFeaturesManager
    from mindspeed.registry import catalog

    names = {name.removeprefix("compat:").replace("-", "_") for name in catalog().usable} | BY_DEST.keys()
    for feature in MindSpeedFeaturesManager.FEATURES_LIST:
        names |= {feature.feature_name, *(action.dest for action in own_arguments(feature))}
    return names | _megatron_names()


def _megatron_names() -> set[str]:
    """Arguments of the Megatron that is installed: of its configurations, and of Megatron-LM's parser as recorded."""
    from mindspeed.engine.inspection.cli_arguments import surface
    from mindspeed.engine.inspection.config_arguments import known_arguments
    from mindspeed.engine.inspection.megatron_copies import megatron_version

    version = megatron_version()
    names = set[str]().union(*known_arguments().values())
    recorded = surface(version) if version is not None else None
    return names | (recorded.by_dest.keys() if recorded is not None else set())
