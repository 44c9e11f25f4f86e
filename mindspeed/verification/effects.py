"""Did the feature do anything? A proof that compares two equal runs proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mindspeed import registry
from mindspeed.plugins.patches import Wrap
from mindspeed.verification.case import VerificationCase, required_by
from mindspeed.verification.comparison import Check
from mindspeed.verification.record import RankResult


def missing_effects(case: VerificationCase, baseline: Sequence[RankResult], feature: Sequence[RankResult]) -> Iterator[Check]:
    """A failing check for every feature under test that left no trace, or whose group has one rank."""
    known = registry.catalog()
    before, after = baseline[0].settings, feature[0].settings
    for name in case.features:
        needed = [size for owner in required_by([name], known) for size in known.feature(owner).spec.sizes]
        idle = [size for size in sorted(needed) if feature[0].sizes.get(size, 1) == 1]
        if idle:
            yield _failed(name, f"the group of {', '.join(idle)} has one rank")
        uncalled = [op for op in known.feature(name).spec.ops if not any(r.reached.get(name, {}).get(op) for r in feature)]
        if uncalled:
            yield _failed(name, f"the operator {', '.join(uncalled)} was not called")
            continue
        arguments = {planned.override.argument for planned in case.plan.overrides if name in planned.owners}
        if arguments and _values(arguments, before) != _values(arguments, after):
            continue
        if _was_reached(name, case, feature, glue=bool(arguments)):
            continue
        if arguments:
            yield _failed(name, "the configuration that reached the model equals the baseline's")
        elif not known.feature(name).spec.sizes:
            yield _failed(name, "no patch site was reached, and no hook changed anything")


def _was_reached(name: str, case: VerificationCase, records: Iterable[RankResult], glue: bool) -> bool:
    """Whether a patch of the feature was, or a hook did something. With ``glue`` its wraps only help arguments to work."""
    passive = {planned.site for planned in case.plan.patches if glue and isinstance(planned.patch, Wrap)}
    reached = [(place, count) for record in records for place, count in record.reached.get(name, {}).items()]
    return any(count and place not in passive for place, count in reached)


def _values(arguments: Iterable[str], settings: Mapping[str, str]) -> dict[str, str]:
    return {place: value for place, value in settings.items() if place.partition(".")[2] in arguments}


def _failed(name: str, why: str) -> Check:
    return Check(f"effect of {name}: {why}", None, 0.0)
