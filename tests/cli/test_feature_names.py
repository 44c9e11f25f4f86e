"""Feature names that are joined by commas or spaces are several names, in every verb that takes them."""

import json

import click
import pytest

from mindspeed.cli import main
from mindspeed.cli.request_options import FeatureNames, split_words
from tests.cli.conftest import LAPTOP

MODEL = ("--tp", "2", "--world-size", "2", "--activation", "silu", "--gated-linear-unit")
NAMES = ("swiglu", "sequence-parallel")


def verbs(command, path=()):
    """Yield every verb below a group with its words."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(click.Context(command)):
        yield from verbs(command.get_command(click.Context(command), name), (*path, name))


@pytest.mark.parametrize(
    "words", [("swiglu,sequence-parallel",), ("swiglu, sequence-parallel",), ("swiglu sequence-parallel",), NAMES]
)
def test_names_in_one_word_or_in_several_are_the_same_request(mindspeed, words):
    plans = []
    for request in (words, [word for name in words for word in ("--features", name)]):
        done = mindspeed("features", "check", *request, *MODEL, *LAPTOP, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        plans.append(json.loads(done.stdout)["plan"])
    assert plans[0] == plans[1]
    assert {*NAMES} <= {feature["name"] for feature in plans[0]["features"]}


def test_spaces_split_the_names_of_the_environment_too(mindspeed, monkeypatch):
    monkeypatch.setenv("MINDSPEED_FEATURES", "swiglu sequence-parallel")
    done = mindspeed("features", "check", *MODEL, *LAPTOP, "--json")
    assert {*NAMES} <= {feature["name"] for feature in json.loads(done.stdout)["plan"]["features"]}


def test_a_word_without_a_name_is_refused(mindspeed):
    done = mindspeed("features", "verify", ",")
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: Invalid value for 'NAME...': ',' names no feature\n")


def test_every_verb_reads_names_by_the_one_function():
    listed = {
        " ".join(path): [p for p in verb.params if p.name in ("names", "features", "without", "tried")]
        for path, verb in verbs(main)
    }
    read = {verb for verb, parameters in listed.items() if parameters}
    assert {
        "features check",
        "features plan",
        "features graph",
        "features verify",
        "tune",
        "memory plan",
        "patches follow",
        "docs",
    } <= read
    for verb, parameters in listed.items():
        for parameter in parameters:
            assert (type(parameter.type), parameter.callback) == (FeatureNames, split_words), (verb, parameter.name)
