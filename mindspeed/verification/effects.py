"""Did the feature do anything? A proof that compares two equal runs proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mindspeed import registry
from mindspeed.verification.case import VerificationCase, required_by
from mindspeed.verification.comparison import Check
from mindspeed.verification.record import RankResult


def missing_effects(case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]) -> Iterator[Check]:
    """A failing check for every feature under test that left no trace.

    A feature whose group has one rank has nothing to do: a row, unless that holds for every feature under test.
    """
    known = registry.catalog()
    before, after = baseline[0].settings, feature[0].settings
    idle = {name: sizes for name in case.features if (sizes := _sizes_of_one(name, feature[0]))}
    for name in case.features:
        if name in idle:
            all_idle = len(idle) == len(case.features)
            reason = f"the group of {', '.join(idle[name])} has one rank"
            yield _failed(name, reason) if all_idle else Check(f"idle of {name}: {reason}", 0.0, 0.0)
            continue
        uncalled = [op for op in known.feature(name).spec.ops if not any(r.reached.get(name, {}).get(op) for r in feature)]
        if uncalled:
            yield _failed(name, f"the operator {', '.join(uncalled)} was not called")
            continue
        arguments = {planned.override.argument for planned in case.plan.overrides if name in planned.owners}
        if arguments and _values(arguments, before) != _values(arguments, after):
            continue
        if any(_acted(record.reached.get(name, {}), passive="around_" if arguments else None) for record in feature):
            continue
        if arguments:
            yield _failed(name, "the configuration that reached the model equals the baseline's")
        elif not known.feature(name).spec.sizes:
            yield _failed(name, "no patch site was reached, and no hook changed anything")


def _sizes_of_one(name: str, record: RankResult) -> list[str]:
    """The parallel sizes that a feature needs and whose group has one rank."""
    known = registry.catalog()
    needed = {size for owner in required_by([name], known) for size in known.feature(owner).spec.sizes}
    return [size for size in sorted(needed) if record.sizes.get(size, 1) == 1]


def _acted(reached: Mapping[str, int], passive: str | None) -> bool:
    """A site or hook was reached. Hooks that begin with ``passive`` may have done nothing, so they do not count."""
    return any(count for place, count in reached.items() if not (passive and place.startswith(passive)))


def _values(arguments: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    return {place: value for place, value in settings.items() if place.partition(".")[2] in arguments}


def _failed(name: str, why: str) -> Check:
    return Check(f"effect of {name}: {why}", None, 0.0)
