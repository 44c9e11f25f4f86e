"""Did the feature do anything? A proof that compares two equal runs proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mindspeed import registry
from mindspeed.verification.comparison import Check
from mindspeed.verification.question import Question, required_by
from mindspeed.verification.record import Record


def missing_effects(question: Question, baseline: Sequence[Record], feature: Sequence[Record]) -> Iterator[Check]:
    """A failing check for every feature under test that left no trace, or whose group has one rank."""
    known = registry.catalog()
    before, after = baseline[0].settings, feature[0].settings
    for name in question.features:
        needed = [size for owner in required_by([name], known) for size in known.feature(owner).spec.sizes]
        idle = [size for size in sorted(needed) if feature[0].sizes.get(size, 1) == 1]
        if idle:
            yield _failed(name, f"the group of {', '.join(idle)} has one rank")
        arguments = [planned.override.argument for planned in question.plan.overrides if name in planned.owners]
        if arguments and _values(arguments, before) != _values(arguments, after):
            continue
        if any(count for record in feature for where in (record.sites, record.hooks) for count in where.get(name, {}).values()):
            continue
        if arguments:
            yield _failed(name, "the configuration that reached the model equals the baseline's")
        elif not known.feature(name).spec.sizes:
            yield _failed(name, "no patch site and no hook was reached")


def _values(arguments: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    return {place: value for place, value in settings.items() if place.partition(".")[2] in set(arguments)}


def _failed(name: str, why: str) -> Check:
    return Check(f"effect of {name}: {why}", None, 0.0)
