"""``features schema``: what an editor says of a job file is what the program says."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from mindspeed.engine.resolution.request import JOB_KEYS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.yaml"


@pytest.fixture
def schema(mindspeed):
    done = mindspeed("features", "schema")
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def errors(schema):
    """Paths of everything that the schema finds wrong with a job."""
    checker = jsonschema.Draft202012Validator(schema)

    def find(job):
        return sorted(".".join(map(str, error.absolute_path)) + ": " + error.message for error in checker.iter_errors(job))

    return find


def test_it_is_a_valid_schema_of_its_dialect(schema):
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert tuple(schema["properties"]) == (
        "features",
        "without",
        "settings",
        "world",
        "level",
        "platform",
        "strict",
        "only",
        "train",
    )
    assert set(schema["properties"]) == set(JOB_KEYS)


def test_the_example_is_valid(errors):
    assert errors(yaml.safe_load(EXAMPLE.read_text())) == []


@pytest.mark.guards(22)
def test_every_mistake_of_a_wrong_file_is_found(errors):
    job = {
        "features": ["tensor-paralel"],
        "settings": {"tensor-parallel": {"size": 0, "colour": "red"}, "recompute": {"granularity": "some"}},
        "world": {"num_layers": "four", "platform": "cpu"},
        "level": 3,
        "train": {"style": "bert", "lr": 0},
        "optimiser": {},
    }
    found = errors(job)
    assert [text.partition(":")[0] for text in found] == [
        "",
        "features.0",
        "level",
        "settings.recompute.granularity",
        "settings.tensor-parallel.size",
        "settings.tensor-parallel",
        "train.lr",
        "train.style",
        "world.num_layers",
        "world",
    ]
    assert found[0] == ": Additional properties are not allowed ('optimiser' was unexpected)"
    assert found[5] == "settings.tensor-parallel: Additional properties are not allowed ('colour' was unexpected)"


@pytest.mark.guards(33)
def test_every_feature_and_setting_has_a_description_and_a_default(schema):
    assert len(schema["$defs"]["feature"]["enum"]) == len(schema["$defs"]["feature"]["enumDescriptions"]) >= 12
    for name, model in schema["properties"]["settings"]["properties"].items():
        assert model["description"], name
        for key, field in model["properties"].items():
            assert field["description"], f"{name}.{key}"
    assert schema["properties"]["settings"]["properties"]["async-ddp"]["properties"]["bucket_size"]["default"] is None


def test_settings_of_the_platform_are_known(errors):
    assert errors({"settings": {"device-emulation": {"poison": True}}}) == []


def test_settings_of_a_third_party_are_known(errors, mindspeed, install):
    install("acme", {"acme-clip": ""})
    schema = json.loads(mindspeed("features", "schema").stdout)
    assert "acme-clip" in schema["$defs"]["feature"]["enum"]
    assert list(jsonschema.Draft202012Validator(schema).iter_errors({"features": ["acme-clip"]})) == []
