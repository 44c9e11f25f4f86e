"""Tests of fixes as data: each audience has its own words, JSON keeps the data."""

import json
import pickle
import re

import pytest

from mindspeed.problems.fixes import (
    AddFeature,
    Advice,
    DropField,
    DropOption,
    DropSetting,
    Fix,
    GiveField,
    GiveOption,
    GiveSetting,
    RemoveFeature,
    RunCommand,
    Together,
    filled,
    fix_from_json,
    fix_to_json,
    in_python,
    on_command_line,
)
from mindspeed.problems.problem import GivenValue, Problem, ResolutionError

EVERY_KIND: Fix = (
    GiveField("tp", 2),
    DropField("num_experts"),
    GiveSetting("ring-attention.window", 1, "divides every size"),
    DropSetting("ring-attention.window"),
    GiveOption("--optimization-level", 2),
    DropOption("--tp-comm-overlap"),
    AddFeature("swiglu"),
    RemoveFeature("mc2"),
    RemoveFeature("coc"),
    RunCommand("mindspeed ops build"),
    Advice("read the log"),
    Together((GiveField("activation", "silu"), GiveField("gated_linear_unit", True))),
)


def test_the_command_line_has_options():
    assert on_command_line(EVERY_KIND) == (
        "--tp 2, or remove --num-experts, or --set ring-attention.window=1 (divides every size), "
        "or remove the setting ring-attention.window, or --optimization-level 2, "
        "or remove --tp-comm-overlap, or add swiglu to the features, or remove mc2 or coc, "
        "or mindspeed ops build, or read the log, or --activation silu --gated-linear-unit"
    )


def test_the_python_api_has_arguments():
    assert in_python(EVERY_KIND) == (
        'world={"tp": 2}, or remove "num_experts" from world, or settings={"ring-attention": {"window": 1}} '
        "(divides every size), or remove the setting ring-attention.window, or level=2, or remove --tp-comm-overlap, or "
        'add "swiglu" to features, or remove mc2 or coc, or mindspeed ops build, or read the log, or '
        'world={"activation": "silu", "gated_linear_unit": True}'
    )


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        (GiveField("tp"), "--tp N"),
        (GiveField("cuda_graphs", False), "--no-cuda-graphs"),
        (GiveSetting("a.b"), "--set a.b=VALUE"),
        (GiveSetting("a.b", False), "--set a.b=false"),
        (GiveOption("--strict"), "--strict"),
    ],
)
def test_an_open_value_and_a_switch_are_spelled_as_the_option_is(fix, text):
    assert on_command_line((fix,)) == text


def test_json_keeps_every_kind_and_the_text_beside_it():
    assert fix_from_json(json.loads(json.dumps(fix_to_json(EVERY_KIND)))) == EVERY_KIND
    problem = Problem("MS302", "tp is 3", ("mc2",), fix=GiveField("tp", 2), facts=[GivenValue("tp", 3, "job file", "--tp")])
    assert problem.to_json() == {
        "code": "MS302",
        "message": "tp is 3",
        "features": ("mc2",),
        "chain": (),
        "where": "",
        "fix": "--tp 2",
        "fixes": [{"kind": "give-field", "field": "tp", "value": 2, "note": "", "or_more": False}],
        "facts": [{"name": "tp", "value": 3, "source": "job file", "option": "--tp"}],
    }
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_names_that_are_left_out_are_the_declaring_features_also_in_steps_that_belong_together():
    fix = (Together((RemoveFeature(), GiveSetting("{}.size", 2))), DropSetting("window"), Advice("see {}"))
    assert filled(fix, "mc2", lambda text: text.format("mc2")) == (
        Together((RemoveFeature("mc2"), GiveSetting("mc2.size", 2))),
        DropSetting("mc2.window"),
        Advice("see mc2"),
    )


def test_an_error_says_fixes_to_its_audience_also_after_pickling():
    error = ResolutionError([Problem("MS302", "tp is 3", fix=GiveField("tp", 2))], in_python)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == 'MS302 tp is 3\n  fix: world={"tp": 2}'


def test_a_sentence_in_place_of_a_fix_is_refused_with_what_to_write():
    text = "the fix of MS302 is a str; a fix is data: GiveField, GiveSetting ..., or Advice('use --tp 2')"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        Problem("MS302", "tp is 3", fix="use --tp 2")
