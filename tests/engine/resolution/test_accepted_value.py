import pytest
from pydantic import TypeAdapter

from mindspeed import registry
from mindspeed.engine.resolution.setting_validation import accepted_value
from mindspeed.plugins import FeatureArgs, Field

SETTINGS = [(name, key) for name in registry.catalog().usable for key in registry.catalog().feature(name).Args.model_fields]


@pytest.mark.parametrize(("name", "key"), SETTINGS)
def test_the_value_that_a_fix_offers_is_accepted(name, key):
    field = registry.catalog().feature(name).Args.model_fields[key]
    value = accepted_value(field)
    assert value is None or TypeAdapter(field.annotation).validate_python(value) == value


def test_a_field_of_no_simple_value_is_left_to_the_reader():
    class Args(FeatureArgs):
        table: dict[str, int] = Field(description="a table")

    assert accepted_value(Args.model_fields["table"]) is None
