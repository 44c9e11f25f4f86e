"""A fix that a message prints can be typed in a shell as it stands, and is accepted."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed import registry
from mindspeed.engine.resolution.request import parse_assignments
from mindspeed.engine.resolution.setting_validation import accepted_value
from mindspeed.problems import Fix, Fixes, on_command_line

MODELS = registry.catalog().models
FIELDS = [(name, field) for name, model in sorted(MODELS.items()) for field in model.model_fields]


def accepted(feature: str, setting: str, value: Any) -> None:
    """Type a fix: the shell's words, the parser of assignments, the model of the feature."""
    dash, text = shlex.split(on_command_line((Fix.give_setting(f"{feature}.{setting}", value),)))
    assert dash == "--set"
    given = parse_assignments([text], "--set")[feature]
    try:
        MODELS[feature](**given)
    except ValidationError as error:
        refused = [detail for detail in error.errors() if detail["loc"] == (setting,)]
        assert refused == [], text


def given_by(fixes: Fixes) -> Iterator[Fix]:
    for fix in fixes:
        if fix.verb == "give-setting":
            yield fix
        yield from given_by(fix.steps)


@pytest.mark.parametrize(("feature", "setting"), FIELDS, ids=lambda word: word)
def test_the_value_that_a_refused_setting_is_told_is_accepted(feature, setting):
    field = MODELS[feature].model_fields[setting]
    accepted(feature, setting, accepted_value(field))


def test_settings_that_conditions_tell_are_accepted():
    told = [
        (name if "." not in step.name else step.name.partition(".")[0], step.name.rpartition(".")[2], step.value)
        for name, spec in registry.catalog().specs.items()
        for constraint in spec.constraints
        for step in given_by(getattr(constraint, "fix", ()))
        if step.value is not None and "{" not in str(step.value)
    ]
    assert len(told) > 15
    for feature, setting, value in told:
        accepted(feature, setting, value)


@pytest.mark.parametrize("value", ["a b", "$HOME", "it's", "[0", "*", "2024-13-99", "", "!x", "a: b", "#", "~"])
def test_a_text_comes_through_a_shell_and_the_parser_as_it_is(value):
    dash, text = shlex.split(on_command_line((Fix.give_setting("a.b", value),)))
    assert (dash, parse_assignments([text], "--set")) == ("--set", {"a": {"b": value}})
