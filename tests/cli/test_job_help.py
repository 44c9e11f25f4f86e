"""Help and completion of verbs that take a job."""

import pytest
from click.shell_completion import ShellComplete

from mindspeed.cli import main

VERBS = [("features", "plan"), ("features", "verify"), ("features", "graph"), ("lock",), ("checkpoint", "diff"), ("run",)]


@pytest.mark.parametrize("verb", VERBS)
def test_options_of_a_job_stand_in_sections_of_their_own_and_sizes_are_not_repeated(mindspeed, verb):
    text = mindspeed(*verb, "--help").stdout
    own, job, sizes = text.index("\nOptions:"), text.index("\nJob:"), text.index("\nSizes of the job and shape of the model:")
    assert own < job < sizes
    assert job < text.index("--without NAME,...") < sizes
    assert "--hidden-size" not in text
    assert "options: mindspeed features check --help" in text


@pytest.mark.parametrize("verb", [("features", "check"), ("pretrain",)])
def test_two_verbs_list_every_size(mindspeed, verb):
    text = mindspeed(*verb, "--help").stdout
    assert text.index("\nSizes of the job and shape of the model:") < text.index("--hidden-size N")


def completed(*words: str) -> list[str]:
    *before, incomplete = words
    completion = ShellComplete(main, {}, "mindspeed", "_MINDSPEED_COMPLETE")
    return [item.value for item in completion.get_completions(before, incomplete)]


def test_names_of_features_are_completed_as_arguments_and_in_lists():
    assert completed("features", "plan", "ring") == ["ring-attention", "ring-attention-update"]
    assert completed("run", "--features", "swiglu,tens") == ["swiglu,tensor-parallel", "swiglu,tensor-parallel-2d"]
    assert completed("docs", "swi") == ["swiglu"]
