"""Put the plan's `ArgOverride`s where Megatron reads its arguments: configurations, and ``initialize_model_parallel``.

A script that sets an argument otherwise than the plan is refused. Nothing here imports megatron.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.config_arguments import arguments_of
from mindspeed.engine.planning.plan import PlannedOverride
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.job_conditions import report_step_aside
from mindspeed.job.megatron_arguments import OF_TRAINING
from mindspeed.plugins.active import active_feature
from mindspeed.problems import Fix, MindSpeedError, Problem, advice, near_names, suggestion

_OWN_FOLDERS: Final = tuple(str(Path(__file__).resolve().parents[1] / name) for name in ("megatron", "plugins", "engine"))


def check_overrides(overrides: Sequence[PlannedOverride], version: str | None) -> list[Problem]:
    """MS401 for every override of an argument that Megatron does not have, with similar names.

    ``version`` is the Megatron the plan is for; nothing is known about one below all that are recorded.
    """
    places = arguments_of(version) if overrides else None
    if places is None:
        return []
    names = frozenset(OF_TRAINING).union(*places.values())
    problems = []
    for planned in overrides:
        argument = planned.override.argument
        if argument not in names:
            text = f"{argument}, set by {' and '.join(planned.owners)}, is not an argument of megatron-core {version}"
            fix = suggestion(near_names(argument, names, cutoff=0.6))
            problems.append(Problem("MS401", text, planned.owners, fix=advice(fix)))
    return problems


def unused_overrides() -> tuple[PlannedOverride, ...]:
    """The active plan's overrides that no configuration and no call has used so far; those for Megatron-LM are optional."""
    active = session.current()
    if active is None:
        return ()
    return tuple(row for row in active.plan.overrides if not row.optional and row.override.argument not in active.proof.taken)


def override_fields(config: Any) -> None:
    """Set the fields of a configuration to the plan's values, before its ``__post_init__``."""
    fields = {field.name: (getattr(config, field.name, None), _default(field)) for field in dataclasses.fields(config)}
    for name, value in _values_for(type(config).__name__, fields, config).items():
        setattr(config, name, value)


def override_parameters(original: Callable[..., Any], **unchosen: Any) -> Callable[..., Any]:
    """Wrap a function or an ``__init__`` that takes arguments of Megatron as parameters: they get the plan's values.

    ``unchosen`` are values that a script hands on without a choice, as it does a default, where these differ.
    """
    signature = inspect.signature(original)
    place = original.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        defaults = {name: unchosen.get(name, parameter.default) for name, parameter in signature.parameters.items()}
        given = {name: (bound.arguments.get(name, default), default) for name, default in defaults.items()}
        bound.arguments.update(_values_for(place, given, bound.arguments))
        return original(*bound.args, **bound.kwargs)

    return call


def _values_for(place: str, given: Mapping[str, tuple[Any, Any]], subject: Any) -> dict[str, Any]:
    """The plan's values for one place. ``given`` maps the names it has to ``(value, default)``; ``subject`` is what the
    function of a condition receives: the configuration, or the arguments of a call.

    Records what was taken in the session. Raises MS605 for every value that the script chose otherwise; features that level 1
    alone switched on leave the value as it is, with a row.
    """
    active = session.current()
    if active is None:
        return {}
    values, problems = {}, []
    for planned in active.plan.overrides:
        argument, sets = planned.override.argument, planned.override.value
        wanted = list(sets) if isinstance(sets, tuple) else sets
        if argument not in given or not _is_meant_for(planned, given, subject):
            continue
        value, default = given[argument]
        if value not in (default, wanted):
            if owner := _unrequested_owner(planned):
                text = f"the script sets {argument}={value!r}, but {planned.override.value!r} is needed"
                report_step_aside(owner.spec.name, text)
            else:
                problems.append(_disagreement(place, planned, value))
            continue
        values[argument] = wanted
        before = active.proof.taken.setdefault(argument, {})
        if before.get(place, wanted) == wanted:
            before[place] = value
    if problems:
        raise MindSpeedError(problems)
    return values


def _unrequested_owner(planned: PlannedOverride) -> Any:
    """The first feature that sets an argument, if optimization level 1 alone switched on all that do; else None."""
    owners = [active_feature(name) for name in planned.owners]
    return owners[0] if owners and not any(owner is None or owner.requested for owner in owners) else None


def _is_meant_for(planned: PlannedOverride, given: Mapping[str, tuple[Any, Any]], subject: Any) -> bool:
    """Return whether a configuration meets the condition of an override."""
    only = planned.override.only
    if only is None:
        return True
    if isinstance(only, str):
        return bool(_function(planned, only)(subject))
    return all(field in given and _equals(given[field][0], value) for field, value in dict(only).items())


def _equals(actual: Any, value: Any) -> bool:
    return bool(actual == value or (callable(actual) and getattr(actual, "__name__", None) == value))


def _function(planned: PlannedOverride, reference: str) -> Callable[[Any], Any]:
    try:
        function: Callable[[Any], Any] = pkgutil.resolve_name(reference)
    except (ImportError, AttributeError) as error:
        text = (
            f"the function {reference} cannot be imported: {error}. Without this condition of a feature, mindspeed cannot "
            f"decide whether to set Megatron's argument {planned.override.argument}. The feature's author must correct the "
            "function"
        )
        raise MindSpeedError(
            [Problem("MS406", text, planned.owners, fix=tuple(map(Fix.remove_feature, planned.owners)))]
        ) from error
    return function


def _disagreement(place: str, planned: PlannedOverride, value: Any) -> Problem:
    argument, owners = planned.override.argument, ", ".join(planned.owners)
    text = f"the script sets {argument}={value!r}, but the plan sets {argument}={planned.override.value!r} for {owners}"
    fix = f"remove {argument} from the script, or change the settings of {owners}"
    return Problem("MS605", text, planned.owners, where=f"{place} at {_caller()}", fix=advice(fix))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _caller() -> str:
    """``file:line`` of the code that made the configuration, past ours and the generated ``__init__`` methods."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(("<string>", *_OWN_FOLDERS)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
