"""The hook points: every upstream function that is wrapped for the framework, and what happens there. Light.

Each function has one wrap, whatever a plan needs of it: arguments, phases of the run and hooks. Wrappers are functions of
`mindspeed.megatron.hook_wrappers`, or of `mindspeed.megatron.training_hook_wrappers` for the training loop of Megatron-LM.
These files and ``hook_points.json`` are all there is to adapt for hooks when Megatron changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from mindspeed.engine.inspection.config_arguments import arguments_of
from mindspeed.engine.inspection.contracts import ABSENT, contract_for
from mindspeed.engine.inspection.megatron_copies import megatron_version, package_root
from mindspeed.engine.resolution.environment import version_in
from mindspeed.files.tables import fields_of, json_beside
from mindspeed.plugins.feature import Category, Feature, FeatureArgs, FeatureSpec
from mindspeed.plugins.patches import Patch, Phase, When, Wrap


class MegatronHookPoints(Feature[FeatureArgs]):
    """Wrap Megatron's functions once each for hooks and argument overrides.

    The plan asks `hook_points_for` for the wraps that it needs.
    """

    spec = FeatureSpec(
        name="megatron-hook-points",
        category=Category.PLATFORM,
        level=0,
    )


_CORE: Final = "megatron.core"
_TRAINING: Final = "megatron.training"


@dataclass(frozen=True, slots=True)
class HookPoint:
    """Describe an upstream function and everything that mindspeed's wrapper of it may do.

    ``arguments`` is the place whose overrides are put in (`mindspeed.engine.inspection.config_arguments.PLACES`), ``hooks`` are
    those that are called. ``run`` says which phase of the run begins or ends, for every plan with a feature; ``loop`` what
    every plan for Megatron-LM's training loop needs, ``cpu`` what every plan for the CPU needs. ``megatron`` are the
    releases that have the function, ``by_name`` is as of a Wrap, and with ``asks`` conditions of features are asked there too.
    """

    target: str
    wrapper: str
    phase: Phase
    hooks: tuple[str, ...] = ()
    arguments: str = ""
    run: str = ""
    loop: str = ""
    cpu: str = ""
    megatron: str = ""
    by_name: bool = False
    asks: bool = False

    def wrap(self, reasons: Collection[str]) -> Wrap:
        """Return the one wrap of this function, with what a plan needs it for."""
        module = "hook_wrappers" if self.target.startswith(_CORE) else "training_hook_wrappers"
        return Wrap(
            self.target,
            f"mindspeed.megatron.{module}:{self.wrapper}",
            "; ".join(reasons),
            When(self.megatron) if self.megatron else None,
            self.phase,
            by_name=self.by_name,
        )


def _hook_points(place: str) -> tuple[HookPoint, ...]:
    return tuple(HookPoint(**fields_of(row)) for row in _TABLES[place])


_TABLES: Final[dict[str, list[dict[str, Any]]]] = json_beside(__file__)
CORE_HOOK_POINTS: Final = _hook_points("core")
"""The hook points in megatron-core, which every script passes."""

TRAINING_HOOK_POINTS: Final = _hook_points("training")
"""The hook points in Megatron-LM's training loop; another loop calls their hooks by `mindspeed.engine.runtime.session`."""

_PLATFORM: Final = "replaces defaults of Megatron-LM that the platform does not support"

PLATFORM_HOOK_POINTS: Final = (
    HookPoint(f"{_TRAINING}.arguments:parse_args", "parse_args_for_platform", "setup").wrap([_PLATFORM]),
    HookPoint(f"{_TRAINING}.arguments:validate_args", "validate_args_for_platform", "setup").wrap([_PLATFORM]),
)
"""Wraps of a plan that was not made from a command line, such as that of a unit test, for processes that import Megatron-LM.

Every such plan has them, so that it is the same with and without a checkout of Megatron-LM.
"""


LOADING: Final = HookPoint(f"{_TRAINING}.checkpointing:load_checkpoint", "load_hugging_face", "checkpoint").wrap(
    ["loads the weights of a Hugging Face model"]
)
"""The wrap of a plan for a command that loads a Hugging Face model, around that for what features have saved."""


def hook_points_for(
    hooks: Collection[str],
    overrides: Collection[str],
    training: bool = False,
    megatron: str | None = None,
    phases: bool = False,
    platform: str | None = None,
    asked: frozenset[str] = frozenset(),
) -> list[Patch]:
    """Return the wraps that a plan needs: one for each upstream function where something of it happens.

    ``hooks`` are those that its features implement, ``overrides`` the names of its arguments, ``megatron`` the version that
    it is for, the installed one if not given. Where nothing is known about that, every place of arguments is wrapped.
    ``training`` adds Megatron-LM's training loop, without which only the platform's arguments reach it, ``phases`` the points
    where a phase of the run begins or ends, ``platform`` those that a platform needs. Before the hooks
    ``asked`` conditions of features are asked.
    """
    version = megatron or megatron_version()
    known = arguments_of(version) if overrides else {}
    wraps: list[Patch] = []
    of_core = [point for point in CORE_HOOK_POINTS if version is None or version_in(version, point.megatron)]
    of_training = [point for point in TRAINING_HOOK_POINTS if training and _is_present(point, version)]
    for point in (*of_core, *of_training):
        has_arguments = point.arguments and (known is None or not known.get(point.arguments, frozenset()).isdisjoint(overrides))
        called = [hook for hook in point.hooks if hook in hooks]
        reasons = (
            f"passes the plan's arguments to {point.arguments}" if has_arguments else "",
            point.run if phases else "",
            point.loop if training else "",
            f"calls the hook{'s' if len(called) > 1 else ''} {', '.join(called)}" if called else "",
            "checks the conditions of features" if (point.asks and asked) or not asked.isdisjoint(point.hooks) else "",
            point.cpu if platform == "cpu" else "",
        )
        if any(reasons):
            wraps.append(point.wrap([reason for reason in reasons if reason]))
    return wraps if training else [*wraps, *PLATFORM_HOOK_POINTS]


def all_hook_patches() -> Iterator[Patch]:
    """Yield the wrap of every hook point, whichever of them a plan may need."""
    for point in (*CORE_HOOK_POINTS, *TRAINING_HOOK_POINTS):
        yield point.wrap(["lets hooks of features run here"])
    yield from PLATFORM_HOOK_POINTS


def _is_present(point: HookPoint, version: str | None) -> bool:
    """Return whether Megatron-LM has the function of a hook point: the one here, else the recorded one of a version."""
    if not point.loop:
        return True
    if (root := package_root("training")) is not None:
        module = point.target.partition(":")[0].removeprefix("megatron.")
        return root.joinpath(*module.split(".")).with_suffix(".py").is_file()
    known = contract_for(point.target, version) if version is not None else None
    return known is None or known[1].kind != ABSENT
