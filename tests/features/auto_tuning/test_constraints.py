"""A training run reports; the search is a command."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from mindspeed.features.auto_tuning.feature import AutoTuning, AutoTuningArgs, add_to_store
from mindspeed.plugins import World
from mindspeed.workbench.tuning.measure import Store, machine_facts
from mindspeed.workbench.tuning.output import write
from mindspeed.workbench.tuning.search import Configuration, Found
from mindspeed.workbench.tuning.space import Choice
from tests.features.resolving import ask


def test_a_lost_prediction_is_a_warning(tmp_path: Path) -> None:
    values = {"predicted_seconds": 0.5, "prediction": str(tmp_path / "prediction.json")}
    rows = {row.text for row in ask("auto-tuning", settings={"auto-tuning": values}).rows}
    text = f"file {tmp_path}/prediction.json does not exist, so measured step times are not stored for later searches"
    assert text in rows


def steps(feature: AutoTuning, count: int) -> list[Any]:
    state, found = SimpleNamespace(step=0), []
    feature.activated()
    for _ in range(count):
        with feature.around_train_step(state=state):
            pass
        found.append(feature.step_metrics(state=state))
    return found


def test_the_error_is_relative_to_what_was_measured() -> None:
    feature = AutoTuning(AutoTuningArgs(predicted_seconds=0.5), World({}))
    found = steps(feature, 4)
    assert found[:3] == [None, None, None]
    assert found[3] is not None
    feature.seconds = [0.4]
    numbers = feature.step_metrics(state=SimpleNamespace(step=0))
    assert numbers is not None
    assert abs(numbers["error"] - 0.25) < 1e-12


def test_a_run_of_a_found_job_adds_its_steps_to_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", machine_facts("cpu"), {"num_layers": 2})
    row = Configuration(Choice(), {"tp": 1}, 0.5, 1000, True, {"step": 1.0})
    found = Found(1, 1, 1, 0.0, (row,), None, (), ())
    write(found, lambda row: {"world": {"tp": 1}}, tmp_path, store)
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert job["features"] == ["auto-tuning"]
    feature = AutoTuning(AutoTuningArgs(**job["settings"]["auto-tuning"]), World({}))
    assert steps(feature, 12)[-1] is not None
    assert store.measurements() == {}
    steps(feature, 13)
    (measured,) = store.measurements().values()
    assert (measured.key, measured.work, measured.steps) == (row.key, {"step": 1.0}, 10)
    assert store.staleness() is None


def test_a_run_on_another_machine_adds_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", {**machine_facts("cpu"), "cores": "1024"}, {"num_layers": 2})
    row = Configuration(Choice(), {"tp": 1}, 0.5, 1000, True, {"step": 1.0})
    write(Found(1, 1, 1, 0.0, (row,), None, (), ()), lambda row: {}, tmp_path, store)
    assert not add_to_store(tmp_path / "prediction.json", [1.0])
    assert store.measurements() == {}
