"""Tests of fixes as data: each audience has its own words, JSON keeps the data."""

import json
import pickle
import re

import pytest

from mindspeed.problems import (
    Fix,
    Fixes,
    GivenValue,
    Problem,
    ResolutionError,
    filled,
    fixes_from_json,
    fixes_to_json,
    in_python,
    on_command_line,
)

EVERY_KIND: Fixes = (
    Fix.give_field("tp", 2),
    Fix.drop_field("num_experts"),
    Fix.give_setting("ring-attention.window", 1, "divides every size"),
    Fix.drop_setting("ring-attention.window"),
    Fix.give_option("--optimization-level", 2),
    Fix.drop_option("--tp-comm-overlap"),
    Fix.add_feature("swiglu"),
    Fix.remove_feature("mc2"),
    Fix.remove_feature("coc"),
    Fix.run_command("mindspeed ops build"),
    Fix.advise("read the log"),
    Fix.together((Fix.give_field("activation", "silu"), Fix.give_field("gated_linear_unit", True))),
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
        (Fix.give_field("tp"), "--tp N"),
        (Fix.give_field("dtype"), "--dtype WORD"),
        (Fix.give_field("rotary"), "--[no-]rotary"),
        (Fix.give_field("num_experts", 0), "--num-experts 0"),
        (Fix.give_field("cuda_graphs", False), "--no-cuda-graphs"),
        (Fix.give_setting("a.b"), "--set a.b=VALUE"),
        (Fix.give_setting("a.b", False), "--set a.b=false"),
        (Fix.give_option("--strict"), "--strict"),
    ],
)
def test_an_open_value_and_a_switch_are_spelled_as_the_option_is(fix, text):
    assert on_command_line((fix,)) == text


def test_json_keeps_every_kind_and_the_text_beside_it():
    assert fixes_from_json(json.loads(json.dumps(fixes_to_json(EVERY_KIND)))) == EVERY_KIND
    problem = Problem(
        "MS302", "tp is 3", ("mc2",), fix=Fix.give_field("tp", 2), facts=[GivenValue("tp", 3, "job file", "--tp")]
    )
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
    fix = (
        Fix.together((Fix.remove_feature(), Fix.give_setting("{}.size", 2))),
        Fix.drop_setting("window"),
        Fix.advise("see {}"),
    )
    assert filled(fix, "mc2", lambda text: text.format("mc2")) == (
        Fix.together((Fix.remove_feature("mc2"), Fix.give_setting("mc2.size", 2))),
        Fix.drop_setting("mc2.window"),
        Fix.advise("see mc2"),
    )


def test_an_error_says_fixes_to_its_audience_also_after_pickling():
    error = ResolutionError([Problem("MS302", "tp is 3", fix=Fix.give_field("tp", 2))], in_python)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == 'MS302 tp is 3\n  fix: world={"tp": 2}'


def test_a_sentence_in_place_of_a_fix_is_refused_with_what_to_write():
    text = "the fix of MS302 is a str; a fix is data: Fix.give_field(...), Fix.give_setting(...) or Fix.advise('use --tp 2')"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        Problem("MS302", "tp is 3", fix="use --tp 2")
