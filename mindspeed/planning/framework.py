"""The framework's own part of every plan, handed to planning by `mindspeed.registry`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.planning.plan import PlannedOverride
from mindspeed.plugins.feature import Feature
from mindspeed.plugins.patches import Patch
from mindspeed.plugins.problems import Problem
from mindspeed.resolution.environment import Environment

HookPatches = Callable[[Collection[str], Collection[str], Environment, bool], Sequence[tuple[str, Patch]]]
"""``(hooks, overridden arguments, environment, proven) -> [(owner, patch)]``; ``proven``: the plan has features to watch."""


@dataclass(frozen=True, slots=True)
class Framework:
    """The level-0 features of one platform, and the patches through which Megatron calls hooks and takes arguments.

    ``optional_arguments`` are those that no configuration of megatron-core has, so that they need not be taken.
    """

    base: tuple[type[Feature[Any]], ...]
    hook_patches: HookPatches
    check_overrides: Callable[[Sequence[PlannedOverride], str | None], list[Problem]]
    optional_arguments: frozenset[str] = frozenset()
