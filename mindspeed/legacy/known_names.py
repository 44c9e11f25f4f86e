"""Collect the names that a check of an old feature can mean: features, arguments of Megatron, of old features, old flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection

from mindspeed.legacy.flags import BY_DEST
from mindspeed.plugins.near_names import near_names, suggestion
from mindspeed.plugins.problems import MindSpeedError, Problem


def check_name(feature: str, name: str, verb: str, args: Namespace) -> None:
    """Raise MS110 when nobody has the name that ``feature`` checks against."""
    wanted = name.replace("-", "_")
    if not hasattr(args, wanted) and wanted not in (known := known_names()):
        raise MindSpeedError([unknown_name(feature, name, verb, known)])


def unknown_name(feature: str, name: str, verb: str, known: Collection[str], where: str = "") -> Problem:
    """MS110 for a name that nobody has, with near ones."""
    near = near_names(name.replace("-", "_"), sorted(known), cutoff=0.6)
    text = f"{feature} {verb} {name}, which is neither a feature nor an argument of Megatron or of any feature"
    fix = suggestion(near, "name a feature or an argument that exists")
    return Problem("MS110", text, (feature,), where=where, fix=fix)


def known_names() -> set[str]:
    """Every name that an argument or a feature has here, with underscores."""
    from mindspeed.legacy.adapter import own_arguments
    from mindspeed.legacy.manager import MindSpeedFeaturesManager
    from mindspeed.registry import catalog

    names = {name.removeprefix("compat:").replace("-", "_") for name in catalog().usable} | BY_DEST.keys()
    for feature in MindSpeedFeaturesManager.FEATURES_LIST:
        names.add(feature.feature_name)
        names |= {action.dest for action in own_arguments(feature)}
    return names | megatron_names()


def megatron_names() -> set[str]:
    """Arguments of the Megatron that is installed: of its configurations, and of Megatron-LM's parser as recorded."""
    from mindspeed.inspection.cli_arguments import surface
    from mindspeed.inspection.config_arguments import known_arguments
    from mindspeed.inspection.megatron_copies import megatron_version

    version = megatron_version()
    names = set[str]().union(*known_arguments().values())
    recorded = surface(version) if version is not None else None
    return names | (recorded.by_dest.keys() if recorded is not None else set())
