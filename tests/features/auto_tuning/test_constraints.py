"""A training run reports; the search is a command."""

from __future__ import annotations

from types import SimpleNamespace

from mindspeed.features.auto_tuning.feature import AutoTuning, AutoTuningArgs
from mindspeed.plugins import World
from tests.features.resolving import active, refusals


def test_a_run_is_told_how_to_search() -> None:
    assert refusals("auto-tuning", settings={"auto-tuning": {"mode": "white", "ranks": 16}}) == [
        "MS304 auto-tuning: a training run does not search for its layout "
        "| mindspeed tune --world-size N --output FOLDER, then train with -f FOLDER/job.yaml"
    ]


def test_a_run_with_a_prediction_is_taken() -> None:
    assert "auto-tuning" in active("auto-tuning", settings={"auto-tuning": {"predicted_seconds": 0.5}})


def test_the_error_is_relative_to_what_was_measured() -> None:
    feature = AutoTuning(AutoTuningArgs(predicted_seconds=0.5), World({}))
    state = SimpleNamespace(step=0)
    found = []
    for _ in range(4):
        with feature.around_train_step(state=state):
            pass
        found.append(feature.step_metrics(state=state))
    assert found[:3] == [None, None, None]
    assert found[3] is not None
    feature.seconds = 0.4
    numbers = feature.step_metrics(state=state)
    assert numbers is not None
    assert abs(numbers["error"] - 0.25) < 1e-12
