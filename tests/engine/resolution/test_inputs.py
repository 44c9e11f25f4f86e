"""Wrong arguments of the Python API, and of the sources of a request, are one clear problem each."""

import pytest

import mindspeed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.job_file import load_job_file
from mindspeed.engine.resolution.request import layer_from_environment, parse_assignments
from mindspeed.problems import MindSpeedError, ResolutionError

CPU = made_up("cpu", "0.16.1")
ARGUMENTS = [
    ({"settings": {"recompute": "full"}}, "settings.recompute is 'full', not a mapping of settings"),
    ({"settings": "recompute"}, "settings is 'recompute', not a mapping of features to settings"),
    ({"features": [1]}, "the list 'features' contains 1, but must contain only names of features"),
    ({"features": "swiglu"}, "features is 'swiglu', not a list of names"),
    ({"without": "swiglu"}, "without is 'swiglu', not a list of names"),
    ({"world": "tp=2"}, "world is 'tp=2', not a mapping of world fields"),
    ({"level": "1"}, "level is '1', not 0, 1 or 2"),
    ({"platform": 1}, "platform is 1, not npu, cuda or cpu"),
    ({"environment": "cpu"}, "the argument environment of mindspeed.plan is 'cpu', but it must be an Environment"),
]


def message(caught):
    (problem,) = caught.value.problems
    return problem.message


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=[text for _, text in ARGUMENTS])
def test_an_argument_of_plan_with_a_wrong_type_is_one_problem(arguments, expected):
    with pytest.raises(ResolutionError) as caught:
        mindspeed.plan(**{"environment": CPU, **arguments})
    assert message(caught) == expected


def test_any_collection_of_names_will_do():
    assert "tensor-parallel" in mindspeed.plan(features=(name for name in ["tensor-parallel"]), environment=CPU).names


def test_only_a_plan_can_be_activated():
    with pytest.raises(ResolutionError) as caught:
        mindspeed.activate("swiglu")
    assert message(caught) == "the argument of mindspeed.activate is 'swiglu', but it must be an ActivationPlan"


def test_a_version_of_megatron_that_is_no_number_is_named():
    with pytest.raises(ResolutionError) as caught:
        mindspeed.plan(environment=made_up("cpu", "banana"))
    assert message(caught) == "megatron-core 'banana' is not a version"


MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"features": ["zero-bubble"], "settings": {"zero-bubble": {"costs": "nope"}}},
            "zero-bubble.costs is 'nope': input should be a valid tuple, or input should be 'measured'",
        ),
        (
            {"features": ["zero-bubble"], "settings": {"zero-bubble": {"costs": [1, 2]}}},
            "zero-bubble.costs is [1, 2]: item 3 is missing, or input should be 'measured'",
        ),
        (
            {"features": ["zero-bubble"], "settings": {"zero-bubble": {"hop": "x"}}},
            "zero-bubble.hop is 'x': input should be a valid number, unable to parse string as a number",
        ),
        (
            {"features": ["virtual-pipeline"], "settings": {"virtual-pipeline": {"size": 10**30}}},
            f"virtual-pipeline.size is {10**30}: input should be less than or equal to {MOST}",
        ),
        ({"world": {"pp": 2, "tp": 10**30}}, f"tp is {10**30}, which is greater than {MOST} (tensor-parallel size)"),
    ],
)
def test_a_setting_that_fits_no_type_or_bound_is_one_problem(arguments, expected):
    with pytest.raises(ResolutionError) as caught:
        mindspeed.plan(**{"world": {"pp": 2}, "environment": CPU, **arguments})
    assert message(caught) == expected


def test_chunks_that_no_layout_fills_are_a_problem():
    world = {"world_size": 2, "pp": 2, "vpp": 10**12, "num_layers": 4, "global_batch_size": 8, "micro_batch_size": 1}
    with pytest.raises(ResolutionError) as caught:
        mindspeed.plan(world=world, environment=CPU)
    assert {problem.code for problem in caught.value.problems} == {"MS304"}


@pytest.mark.parametrize("sizes", [{"world_size": 4, "tp": 8}, {"world_size": 1, "pp": 2}])
def test_more_parallel_ranks_than_processes_are_a_problem_of_sizes(sizes):
    model = {"num_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "global_batch_size": 8, "micro_batch_size": 1}
    with pytest.raises(ResolutionError) as caught:
        mindspeed.plan(["data-parallel"], world={**sizes, **model}, environment=CPU)
    assert [problem.code for problem in caught.value.problems] == ["MS302"]


def test_a_key_that_a_job_file_has_twice_is_named_with_both_lines(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("features: [recompute]\nworld:\n  tp: 1\n  tp: 2\nfeatures: [swiglu]\n")
    with pytest.raises(ResolutionError) as caught:
        load_job_file(job)
    assert [(problem.message, problem.where) for problem in caught.value.problems] == [
        ("the key 'tp' is given twice, first in line 3", f"{job}:4"),
        ("the key 'features' is given twice, first in line 1", f"{job}:5"),
    ]


def test_a_setting_that_is_given_twice_and_differently_is_a_problem():
    assert parse_assignments(["a.size=2", "a.size=2"], "--set") == {"a": {"size": 2}}
    with pytest.raises(MindSpeedError) as caught:
        parse_assignments(["a.size=2", "a.size=3"], "--set")
    assert str(caught.value) == ("MS303 a.size is given twice: 2 and 3\n  where: --set\n  fix: keep one of them")


def test_a_variable_that_nothing_reads_is_a_warning_with_near_names(monkeypatch):
    monkeypatch.setenv("MINDSPEED_FEATURS", "swiglu")
    (row,) = [row for row in mindspeed.plan(environment=CPU).rows if row.kind == "warning"]
    assert row.text == "mindspeed does not read the variable MINDSPEED_FEATURS; did you mean MINDSPEED_FEATURES?"


def test_a_variable_whose_value_means_nothing_is_a_problem():
    with pytest.raises(MindSpeedError) as caught:
        layer_from_environment({"MINDSPEED_STRICT": "maybe", "MINDSPEED_OPS": "reference"})
    text = "MS301 MINDSPEED_STRICT is 'maybe', not 1 or 0\n  where: MINDSPEED_STRICT"
    assert str(caught.value) == f"{text}\n  fix: unset MINDSPEED_STRICT, or set it to 1 or 0"


def test_an_off_switch_for_a_feature_that_does_not_exist_is_a_warning_with_near_names(monkeypatch):
    monkeypatch.setenv("MINDSPEED_DISABLE", "swigluu")
    (row,) = [row for row in mindspeed.plan(environment=CPU).rows if row.kind == "warning"]
    assert row.text == "MINDSPEED_DISABLE names swigluu, which is not a feature; did you mean swiglu?"
