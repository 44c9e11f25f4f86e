"""The plan that is active in this process, as features see it: their instances, and where they report problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from mindspeed.problems import Problem

FeatureT = TypeVar("FeatureT")

MakeRange = Callable[[str], AbstractContextManager[Any]]
"""Make a range of a trace from its name, such as ``torch.profiler.record_function``."""


@dataclass(frozen=True, slots=True)
class ActiveFeatures:
    """The feature instances of the active plan by name, and functions of its run.

    ``report(problem, log)`` takes a problem. ``ranges(make)`` is a context manager in which every patch and hook of a feature
    runs inside ``make(name of the feature)``.
    """

    instances: Mapping[str, Any]
    report: Callable[[Problem, bool], None]
    ranges: Callable[[MakeRange], AbstractContextManager[None]]


_active: ActiveFeatures | None = None


def set_active(features: ActiveFeatures | None) -> None:
    """Make these the features of this process; None when the plan ends. Called by the runtime alone."""
    global _active
    _active = features


def active_feature(name: str) -> Any:
    """The instance of a feature in the active plan, for code that a patch points at; None where the plan does not have it."""
    return None if _active is None else _active.instances.get(name)


def active_features(kind: type[FeatureT]) -> list[FeatureT]:
    """Return the instances of a class in the active plan, in its order."""
    return [] if _active is None else [feature for feature in _active.instances.values() if isinstance(feature, kind)]


def feature_ranges(make: MakeRange) -> AbstractContextManager[None]:
    """Run every patch and hook of the active plan inside ``make(name of its feature)`` for the length of a with-block.

    Outside the block nothing of it is left: functions are swapped in and out.
    """
    return nullcontext() if _active is None else _active.ranges(make)


def report_problem(problem: Problem, log: bool = True) -> None:
    """Report that the job does something wrong, once for each problem: a row of the report, printed where ``log``.

    Raises MindSpeedError under a strict plan. Without an active plan nothing happens.
    """
    if _active is not None:
        _active.report(problem, log)
