"""Validating settings against a feature's argument model, in the user's words."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from mindspeed.engine.resolution.planned_feature import Value
from mindspeed.engine.resolution.request_merge import Settings
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.problems import Fix, GivenValue, Problem, brief, filled, near_names, suggestion


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
        try:
            args = model(**{key: value.value for key, value in (given or {}).items()})
        except ValidationError as error:
            return [self._explain(name, model, detail) for detail in error.errors()]
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
            key: Value(value, given[key].source, given[key].overrode) if given and key in given else Value(value, "default")
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
            fix = Fix.advise(suggestion([f"{name}.{field}" for field in near], f"{name} has no settings"))
            return Problem("MS301", f"{name} has no setting {key!r}", (name,), (), where, fix, facts)
        if detail["type"] == "missing":
            return Problem("MS301", f"{name} needs the setting {key}", (name,), fix=Fix.give_setting(f"{name}.{key}"))
        error = detail.get("ctx", {}).get("error", detail["msg"])  # a validator's own, or the sentence of pydantic
        own_fix = filled(getattr(error, "fix", ()), name, str)
        if not key:
            return Problem(
                "MS301", f"{name}: {error}", (name,), fix=own_fix or Fix.run_command(f"mindspeed features explain {name}")
            )
        text = f"{name}.{key} is {brief(detail['input'])}: {str(error)[0].lower()}{str(error)[1:]}"
        whole = key.partition(".")[0]
        if own_fix or whole not in fields:
            return Problem("MS301", text, (name,), (), where, own_fix, facts)
        value = Fix.give_setting(f"{name}.{whole}", accepted_value(fields[whole]), fields[whole].description or "")
        return Problem("MS301", text, (name,), (), where, value, facts)


def accepted_value(field: FieldInfo) -> Any:
    """Return a value that a field accepts: its default, its lowest number, its first word, also in a list, else ``VALUE``."""
    annotated: Any = Annotated  # type checkers know no annotation that is built from parts
    parts = (field.annotation, *field.metadata, None)
    adapter: TypeAdapter[Any] = TypeAdapter(annotated[parts])
    bounds = [bound.ge for bound in field.metadata if hasattr(bound, "ge")]
    words = _words(field.annotation)
    for value in (field.default, *bounds, *words, *((word,) for word in words), 1):
        with suppress(ValidationError):
            if value is not None and adapter.validate_python(value, strict=True) is not None:
                return value
    return "VALUE"


def _words(annotation: Any) -> list[Any]:
    """The words of a Literal, also of one inside a union."""
    return [word for part in get_args(annotation) for word in (_words(part) if get_args(part) else [part])]


def flag(field_name: str) -> str:
    """The command-line spelling of a field: ``world_size`` -> ``--world-size``."""
    return "--" + field_name.replace("_", "-")
