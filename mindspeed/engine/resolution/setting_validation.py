"""Validating settings against a feature's argument model, in the user's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mindspeed.engine.resolution.planned_feature import DEFAULT, Value
from mindspeed.engine.resolution.request_merge import Settings
from mindspeed.job.fact import MOST
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.problems import Fix, Fixes, GivenValue, Problem, Text, brief, filled, named_in, near_names, renames


class Arguments:
    """The settings of one request; models without settings share one default instance."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._defaults: dict[type[FeatureArgs], FeatureArgs] = {}
        self._default_settings: dict[type[FeatureArgs], dict[str, Value]] = {}

    def validate(self, name: str, model: type[FeatureArgs]) -> FeatureArgs | list[Problem]:
        """The arguments of feature ``name``, or every problem with its settings (MS301)."""
        given = self._settings.get(name)
        if not given and model in self._defaults:
            return self._defaults[model]
        values = {key: value.value for key, value in (given or {}).items()}
        try:
            args = model(**values)
        except ValidationError as error:
            return [self._explain(name, model, detail) for detail in _mistakes(model, values, error.errors())]
        if too_large := [key for key, value in values.items() if isinstance(value, int) and abs(value) > MOST]:
            text = f"input should be less than or equal to {MOST}"
            details = ({"loc": (key,), "type": "less_than_equal", "msg": text, "input": values[key]} for key in too_large)
            return [self._explain(name, model, detail) for detail in details]
        if not given:
            self._defaults[model] = args
        return args

    def settings_of(self, name: str, args: FeatureArgs) -> dict[str, Value]:
        """Every setting of a feature with its source, defaults included."""
        given = self._settings.get(name)
        model = type(args)
        if not given and model in self._default_settings:
            return self._default_settings[model]
        settings = {
            key: Value(value, given[key].source, given[key].overrode) if given and key in given else Value(value, DEFAULT)
            for key, value in args.model_dump(mode="json").items()
        }
        if not given:
            self._default_settings[model] = settings
        return settings

    def _explain(self, name: str, model: type[FeatureArgs], detail: Any) -> Problem:
        fields = model.model_fields
        key = ".".join(map(str, detail["loc"]))
        given = self._settings.get(name, {}).get(key.partition(".")[0])
        where = given.source if given else ""
        facts = (GivenValue(f"{name}.{key}", given.value, given.source, given.option),) if given else ()
        if detail["type"] == "extra_forbidden":
            near = near_names(key, fields) or list(fields)
            fix = renames(f"{name}.{key}", [f"{name}.{field}" for field in near]) or (Fix.drop_setting(f"{name}.{key}"),)
            return Problem(
                "MS301", Text.of("{name} has no setting {key!r}", name=name, key=key), (name,), (), where, fix, facts
            )
        if detail["type"] == "missing":
            value = Fix.give_setting(f"{name}.{key}", accepted_value(fields[key]))
            return Problem("MS301", Text.of("{name} needs the setting {key}", name=name, key=key), (name,), fix=value)
        error = detail.get("ctx", {}).get("error", detail["msg"])  # a validator's own, or the sentence of pydantic
        own_fix = filled(getattr(error, "fix", ()), name, str)
        if not key:
            return self._contradiction(name, str(error), own_fix)
        text = f"{name}.{key} is {brief(detail['input'])}: {_in_sentence(str(error))}"
        whole = key.partition(".")[0]
        if own_fix or whole not in fields:
            return Problem("MS301", text, (name,), (), where, own_fix, facts)
        value = Fix.give_setting(
            f"{name}.{whole}", accepted_value(fields[whole], detail["input"]), fields[whole].description or ""
        )
        return Problem("MS301", text, (name,), (), where, value, facts)

    def _contradiction(self, name: str, error: str, own_fix: Fixes) -> Problem:
        """Return the problem of settings that contradict one another; without a fix of their own any may be dropped."""
        given = {f"{name}.{setting}": value for setting, value in self._settings.get(name, {}).items()}
        fix = own_fix or tuple(map(Fix.drop_setting, given))
        named = {*named_in(fix)}
        facts = (GivenValue(key, value.value, value.source, value.option) for key, value in given.items() if key in named)
        return Problem("MS301", f"{name}: {error}", (name,), fix=fix, facts=facts, rule=", ".join(sorted(named)))


def _mistakes(model: type[FeatureArgs], given: Mapping[str, Any], details: Sequence[Any]) -> Iterator[Any]:
    """Yield one detail for each mistake. A value that fits none of a setting's types is one: the first detail of each type."""
    for place, group in groupby(details, key=lambda detail: detail["loc"][:1]):
        found = list(group)
        field = model.model_fields.get(place[0]) if place else None
        if field is None or not _has_several_types(field.annotation) or any(len(detail["loc"]) == 1 for detail in found):
            yield from found
            continue
        of_types: dict[Any, Any] = {}
        for detail in found:
            of_types.setdefault(detail["loc"][1], detail)
        sentences = (
            f"item {detail['loc'][-1] + 1} is missing" if detail["type"] == "missing" else detail["msg"]
            for detail in of_types.values()
        )
        yield {"loc": place, "type": "union", "msg": ", or ".join(map(_in_sentence, sentences)), "input": given[place[0]]}


def _has_several_types(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


def _in_sentence(text: str) -> str:
    return f"{text[0].lower()}{text[1:]}"


def accepted_value(field: FieldInfo, given: object = None) -> Any:
    """Return a value that a field accepts.

    It is the word most like the given one, the default, an example, the lowest number, the first word or a list of it; None
    where the field accepts none of them.
    """
    annotated: Any = Annotated  # type checkers know no annotation that is built from parts
    parts = (field.annotation, *field.metadata, None)
    adapter: TypeAdapter[Any] = TypeAdapter(annotated[parts])
    bounds = [bound.ge for bound in field.metadata if hasattr(bound, "ge")]
    words = _words(field.annotation)
    near = near_names(given, map(str, words), 0.7) if isinstance(given, str) else ()
    for value in (*near, field.default, *(field.examples or ()), *bounds, *words, *((word,) for word in words), 1):
        with suppress(ValidationError):
            if value is not None and adapter.validate_python(value, strict=True) is not None:
                return value
    return None


def _words(annotation: Any) -> list[Any]:
    """The words of a Literal, also of one inside a union."""
    return [word for part in get_args(annotation) for word in (_words(part) if get_args(part) else [part])]


def flag(field_name: str) -> str:
    """The command-line spelling of a field: ``world_size`` -> ``--world-size``."""
    return "--" + field_name.replace("_", "-")
