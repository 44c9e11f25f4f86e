"""Values for the fixes of a condition that name a field of the job or a setting and leave the value to the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, product
from math import ceil, floor
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ValidationError

from mindspeed.engine.resolution.resolution_state import ResolutionState
from mindspeed.job.world import FIELDS, PARALLEL_SIZES, UnknownValue, World
from mindspeed.plugins.conditions import Condition, ConditionError, is_met
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.problems import Fix, Fixes

_REACH: Final = 1024
"""Distance from the present value within which a number is looked for."""
_COMPARED: Final = 12
"""Values that meet the condition and are compared by the other conditions of the job."""
_OF_LAYOUT: Final = frozenset({"pp", "vpp", "num_layers"})
Values = Mapping[str, Any]


def with_values(state: ResolutionState, name: str, condition: Condition, fixes: Fixes) -> Fixes:
    """Return fixes with a value for each field and setting that has none: one with which the condition holds.

    Of several values the one that breaks the fewest conditions of other features is taken, of those one that switches no
    parallelism off, and the nearest. A fix whose condition no value meets is left out, or drops a list of which no word may
    stay. Where every value meets it, such as one of a budget that is not given, the user alone knows the value, and the fix
    stays as it is.
    """
    return tuple(filled for fix in fixes if (filled := _with_value(state, name, condition, fix)) is not None)


def _with_value(state: ResolutionState, name: str, condition: Condition, fix: Fix) -> Fix | None:
    steps = fix.steps or (fix,)
    open_names = [step.name for step in steps if step.verb in ("give-field", "give-setting") and step.value is None]
    if not open_names:
        return fix
    given = {step.name: step.value for step in steps if step.verb in ("give-field", "give-setting") and step.value is not None}
    ways = ({**given, **dict(zip(open_names, values, strict=True))} for values in _combinations(state, open_names))
    tried = list(islice(ways, 2 * _REACH))
    fitting = list(islice((values for values in tried if _holds(state, name, condition, values)), _COMPARED))
    if _present(state, open_names[0]) is None and fitting == tried[:_COMPARED]:
        return fix
    best = min(fitting, key=lambda values: (broken_conditions(state, values), _switched_off(values)), default=None)
    if best is None:
        is_single = not fix.steps and isinstance(_present(state, fix.name), tuple)
        return (Fix.drop_setting if "." in fix.name else Fix.drop_field)(fix.name) if is_single else None
    filled = tuple(_filled(step, best[step.name]) if step.name in open_names else step for step in steps)
    return Fix.together(filled) if fix.steps else filled[0]


def _filled(step: Fix, value: Any) -> Fix:
    """Give a step its value; a note on further values is no help where a size is switched off."""
    return replace(step, value=value, note="" if value == 1 and step.name in PARALLEL_SIZES else step.note)


def _combinations(state: ResolutionState, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield values for all of these names; several of them may keep the present one."""
    if len(names) == 1:
        return ((value,) for value in _candidates(state, names[0]))
    return product(*([_present(state, name), *islice(_candidates(state, name), _COMPARED)] for name in names))


def _present(state: ResolutionState, name: str) -> Any:
    """Return the value of a field or setting; None where it has none."""
    feature, _, setting = name.rpartition(".")
    if feature:
        return getattr(state.args.get(feature), setting, None)
    return getattr(state.world, name) if state.world.knows(name) else None


def _candidates(state: ResolutionState, name: str) -> Iterator[Any]:
    """Yield values of a field or setting, the nearest to its present one first."""
    feature, _, setting = name.rpartition(".")
    if feature:
        yield from _of_kind(state.models[feature].model_fields[setting].annotation, _present(state, name), fewer_first=False)
    elif words := FIELDS[name].words:
        yield from words
    else:
        yield from _of_kind(FIELDS[name].kind, _present(state, name), fewer_first=name in PARALLEL_SIZES)


def _of_kind(kind: Any, value: Any, fewer_first: bool) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif tuple in (kind, get_origin(kind)):
        words = value if isinstance(value, tuple) else ()
        yield from (left for word in words if (left := tuple(other for other in words if other != word)))
    elif kind is bool:
        yield not value
    elif kind in (int, float):
        start = value if isinstance(value, int | float) else 0
        fewer = range(ceil(start) - 1, max(-1, ceil(start) - _REACH), -1)
        more = range(floor(start) + 1, floor(start) + _REACH)
        yield from map(kind, chain(fewer, more) if fewer_first else chain(more, fewer))
    else:
        yield from chain.from_iterable(_of_kind(part, value, fewer_first) for part in get_args(kind) if part is not NoneType)


def _holds(state: ResolutionState, name: str, condition: Condition, values: Values) -> bool:
    world = _changed(state.world, values)
    args = _args(state, name, values)
    other = _args(state, condition.of, values) if condition.of else None
    return args is not None and _is_within_bounds(values) and _is_met(condition, args, world, other)


def _is_within_bounds(values: Values) -> bool:
    """Return whether numbers of fields of the job are not less than the fields allow."""
    least = {name: FIELDS[name].least for name in values if name in FIELDS}
    return all(bound is None or values[name] >= bound for name, bound in least.items())


def _is_met(condition: Condition, args: FeatureArgs, world: World, other: FeatureArgs | None) -> bool:
    try:
        return is_met(condition, args, world, other)
    except (UnknownValue, ConditionError):
        return True


def broken_conditions(state: ResolutionState, values: Values) -> int:
    """Count the conditions of active features that do not hold with these values, and the layout that ranks do not fill."""
    world = _changed(state.world, values)
    layout = world.tp * world.pp * world.cp
    broken = int(world.knows("world_size") and world.world_size % layout > 0)
    for name, condition in state.declared[Condition]:
        if condition.otherwise != "refuse" or (condition.of and condition.of not in state.active):
            continue
        args, other = _args(state, name, values), _args(state, condition.of, values) if condition.of else None
        broken += args is not None and not _is_met(condition, args, world, other)
    return broken


def _switched_off(values: Values) -> int:
    """Count the parallel sizes that are 1."""
    return sum(values.get(size) == 1 for size in PARALLEL_SIZES)


def _changed(world: World, values: Values) -> World:
    fields = {name: value for name, value in values.items() if name in FIELDS}
    return World(world.known() | fields, () if _OF_LAYOUT & fields.keys() else world.layer_split)


def _args(state: ResolutionState, name: str, values: Values) -> FeatureArgs | None:
    """Return the arguments of a feature with these values; None where it refuses them."""
    args = state.args.get(name)
    if args is None:
        return None
    sizes = state.specs[name].sizes.items()
    changed = {setting: values[size] for size, setting in sizes if setting and size in values}
    changed |= {key.rpartition(".")[2]: value for key, value in values.items() if key.rpartition(".")[0] == name}
    if not changed:
        return args
    with suppress(ValidationError):
        return type(args)(**(args.model_dump(exclude_unset=True) | changed))
    return None
