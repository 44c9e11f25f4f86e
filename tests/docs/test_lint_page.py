"""The page on checking commands: the targets hold in its record, and each finding of a public command is explained."""

import json
import re

import pytest
import yaml

from mindspeed.engine.resolution.environment import version_in
from mindspeed.plugins.discovery import Catalog
from mindspeed.workbench.lint.traps import known_traps
from tools.docs.lint import EXPLANATIONS, LINT, RECORD, explanation_of, reasons_of
from tools.docs.results import BUG_RESULTS
from tools.lint_results import SOURCES, mutations

RESULTS = json.loads(RECORD.read_text(encoding="utf-8"))
MEGATRONS = [name for name in SOURCES if name.startswith("Megatron-LM")]


def test_every_source_is_recorded_with_its_commit():
    assert {name: RESULTS[name]["commit"] for name in SOURCES} == SOURCES


def test_the_recorded_speed_is_that_of_the_target():
    assert RESULTS["speed"]["one"]["wall"] <= 1.0
    assert RESULTS["speed"]["many"]["processor"] <= 15.0


@pytest.mark.parametrize("name", MEGATRONS)
def test_the_targets_hold(name):
    rules = RESULTS[name]["rules"]
    assert rules["decided"] >= 0.9 * rules["rules"]
    assert rules["accepted"] is True
    assert rules["let through"] == []
    assert rules["mutations"] == len(mutations()) >= 50
    assert RESULTS[name]["functional tests"]["commands"] >= 150


def test_every_finding_is_explained():
    reasons = list(reasons_of(RESULTS))
    assert [reason for reason in reasons if explanation_of(reason) is None] == []
    patterns = yaml.safe_load(EXPLANATIONS.read_text(encoding="utf-8"))
    assert [pattern for pattern in patterns if not any(re.search(pattern, reason) for reason in reasons)] == []


BUGS = json.loads(BUG_RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", BUGS)
def test_a_bug_is_of_the_releases_in_which_its_test_has_shown_it(version):
    known = {trap.name: trap for trap in known_traps() if trap.proof}
    assert set().union(*BUGS[version].values()) == known.keys()
    run = known.keys() - BUGS[version].get("not run", {}).keys()
    assert BUGS[version]["shown"].keys() == {name for name in run if version_in(version, known[name].megatron)}


def test_the_page_has_every_table():
    text = LINT.text(Catalog([]))
    assert text.count("\n|---") == 5
    assert "https://github.com/NVIDIA/Megatron-LM/pull/6311" in text
