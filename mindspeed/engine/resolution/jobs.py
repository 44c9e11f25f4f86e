"""The jobs that one resolution decides together: one, or every layout of a search.

A set of jobs is a whole number whose bit ``i`` stands for job ``i``, so that the resolver is written once: a decision about one
job has the set 1 or 0. What a function of the world says of many jobs is asked once for each combination of the fields that it
reads (`mindspeed.workbench.tuning.layout_jobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from mindspeed.job.world import World
from mindspeed.plugins.answers import Contribution, with_contribution

JobSet = int
"""A set of jobs, one bit for each."""


class Jobs(Protocol):
    """The jobs of one resolution."""

    everything: JobSet
    is_single: bool

    def values(
        self, key: Hashable, given: World, contribution: Contribution, function: Callable[[World], Any]
    ) -> Mapping[Any, JobSet]:
        """Return the jobs for which a function of the world has each of its values.

        ``given`` holds what all jobs have in common, and ``contribution`` is what active features add to each of them. Equal
        keys mean equal functions, so that an answer may be kept.
        """


class OneJob:
    """The job of a plan."""

    everything: JobSet = 1
    is_single = True

    def values(
        self, key: Hashable, given: World, contribution: Contribution, function: Callable[[World], Any]
    ) -> Mapping[Any, JobSet]:
        """Ask the function about the job."""
        return {function(with_contribution(given, contribution)): 1}


class NotUniform(Exception):  # noqa: N818 - a signal to split the jobs, not an error
    """Jobs of one resolution need different settings: those of ``jobs``, and the others."""

    def __init__(self, jobs: JobSet) -> None:
        self.jobs = jobs
        super().__init__("jobs differ")


def by_contribution(
    given: Iterable[tuple[Contribution, JobSet]], active: JobSet, scope: JobSet
) -> Iterator[tuple[Contribution, JobSet]]:
    """Yield what a feature adds to the job, and in which jobs: nothing where it is not active."""
    nothing = scope & ~active
    for added, jobs in given:
        if added:
            yield added, jobs & active
        else:
            nothing |= jobs & active
    yield (), nothing
