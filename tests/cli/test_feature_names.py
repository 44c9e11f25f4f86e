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


def test_an_underscore_is_a_dash_in_names_and_in_settings(mindspeed):
    request = ("swap_attention", "--without", "Rms_Norm", "--set", "swap_attention.modules=[core_attention]")
    plans = []
    for words in (request, ("swap-attention", "--without", "rms-norm", "--set", "swap-attention.modules=[core_attention]")):
        done = mindspeed("features", "check", *words, *MODEL, *LAPTOP, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        plans.append(json.loads(done.stdout)["plan"])
    assert plans[0] == plans[1]
    assert mindspeed("features", "explain", "ring_attention", *LAPTOP).stdout.startswith("ring-attention is not active: ")


@pytest.mark.parametrize(
    "verb", ["features check", "features plan", "features graph", "features bisect", "lock", "tune", "pretrain"]
)
def test_features_are_words_or_an_option_of_a_verb_with_a_job(mindspeed, verb):
    refusals = [
        mindspeed(*verb.split(), *words, *LAPTOP, "--nproc" if verb == "pretrain" else "--world-size", 1)
        for words in (["ring-attenton"], ["--features", "ring_attenton"])
    ]
    for done in refusals:
        assert done.exit_code == 1, done.output
        text = "the feature 'ring-attenton' does not exist"
        assert text in done.stderr
        assert "did you mean ring-attention or " in done.stderr


def test_the_features_of_a_verb_about_features_are_words_or_an_option_too(mindspeed):
    pages = [
        mindspeed("docs", *words).stdout for words in (["swiglu,rms_norm"], ["--features", "swiglu", "--features", "rms-norm"])
    ]
    assert pages[0] == pages[1] != ""
    pairs = [
        mindspeed("memory", "pairs", *words, *LAPTOP, *MODEL).stdout
        for words in (["swiglu", "rms-norm"], ["--features", "swiglu rms_norm"])
    ]
    assert pairs[0] == pairs[1]
    assert pairs[0].splitlines()[1].split() == ["rms-norm", "swiglu", "yes"]
    for verb in ("features verify", "memory pairs", "features matrix show"):
        assert mindspeed(*verb.split()).stderr.endswith("Error: name at least one feature\n")
    assert "no guide or feature is named swigl; did you mean swiglu" in mindspeed("docs", "swigl").stderr


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
        for parameter in parameters if verb != "docs" else parameters[1:]:  # whose pages may be paths as well
            assert (type(parameter.type), parameter.callback) == (FeatureNames, split_words), (verb, parameter.name)
