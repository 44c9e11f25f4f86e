"""Exposed transfer time: a feature that promises overlap has results, they are what a recording gives, and pages show them."""

import inspect
import json
import re

import pytest

from benchmarks.exposed import CASES, COLUMNS, RESULTS, record, simulated
from mindspeed.workbench.exposure.machines import PUBLISHED
from mindspeed.workbench.pictures.drawing import svg
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.resolving import CATALOG
from tools.docs import exposed

FOUND = json.loads(RESULTS.read_text("utf-8"))
PROMISE = re.compile(r"overlap|while the next", re.IGNORECASE)


def test_every_feature_whose_description_promises_overlap_has_a_case() -> None:
    named = {name.partition(",")[0] for name in CASES}
    promising = {
        name for name in CATALOG.usable if PROMISE.search(" ".join((inspect.getdoc(CATALOG.feature(name)) or "").split()))
    }
    assert promising - named == set()


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_results_on_both_machines_and_overlaps(name: str) -> None:
    assert set(FOUND[name]) == {machine.name for machine in PUBLISHED}
    for row in FOUND[name].values():
        transfers, at_once, hidden = (row[column] for column in COLUMNS)
        assert 0 <= hidden <= min(at_once, row["step"])
        assert transfers > 0


def test_a_page_has_the_table_and_the_picture_of_its_feature() -> None:
    name = next(iter(FOUND)).partition(",")[0]
    (text,), (picture,) = exposed.lines_of(name), exposed.picture_of(name)
    assert all(machine.name in text for machine in PUBLISHED)
    assert svg(picture).count("<rect") > 10
    assert exposed.lines_of("rms-norm") == exposed.picture_of("rms-norm") == []


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_result_is_what_a_recording_gives(pool: WorkerPool, name: str) -> None:
    programs = record(pool, CASES[name])
    assert {machine.name: simulated(programs, machine) for machine in PUBLISHED} == FOUND[name]
