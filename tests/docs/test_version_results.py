"""The table of features and Megatron versions: made from results, without an empty cell."""

import pytest

from mindspeed.registry import catalog
from mindspeed.workbench.diagnostics.support_matrix import version_results
from mindspeed.workbench.pages.support import NOT_RUN, kernel_table, result_table
from tools.docs.results import PASSED, reason, with_versions

NAMES = sorted(catalog(frozenset()).specs)


def test_every_feature_has_a_cell_for_every_version() -> None:
    header, _, *rows = result_table(NAMES)
    hybrid = sum("hybrid" in row for row in version_results().values())
    assert header.count("|") == len(version_results()) + hybrid + 3  # and the column of Transformer Engine's layers
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == NAMES
    assert not [row for row in rows if "|  |" in row]


def test_every_feature_has_a_share_of_its_calls_on_every_device_and_says_why_it_is_not_all() -> None:
    _, _, *rows = kernel_table(NAMES)
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]
    assert [row[0] for row in cells] == NAMES
    assert not [row for row in cells if not {"-", "100%", NOT_RUN}.issuperset(row[1:3]) and len(row) < 4]


@pytest.mark.long
def test_calls_of_every_feature_were_counted() -> None:
    """A new feature has its row once ``tests/features/test_kernel_calls.py`` and ``tools.docs.results kernels`` have run."""
    assert [row for row in kernel_table(NAMES) if NOT_RUN in row] == []


def test_results_of_a_version_take_the_place_of_what_it_had() -> None:
    refused = "MS208 grouped-matmul-add needs megatron-core <0.17, but the version is 0.19.1\n  fix: another megatron-core"
    cases = {
        "swiglu": {"holds": True, "problems": [], "alone": True},
        "grouped-matmul-add": {"holds": False, "problems": [refused], "alone": True},
        "recompute": {"holds": False, "problems": ["MS607 recompute: the loss differs\n  where: rank 0"], "alone": True},
        "tp2 x pp2": {"holds": True, "problems": [], "alone": False},
    }
    before = {"0.19.1": {"python": "3.10", "torch": "2.6", "features": {"swiglu": NOT_RUN}}, "0.17.1": {}}
    found = with_versions(before, {"": {"megatron": "0.19.1", "python": "3.12.1", "torch": "2.13.0", "cases": cases}})
    assert found["0.17.1"] == {}
    assert found["0.19.1"] == {
        "python": "3.12.1",
        "torch": "2.13.0",
        "features": {
            "grouped-matmul-add": "needs megatron-core <0.17",
            "recompute": "fails: MS607 recompute: the loss differs",
            "swiglu": PASSED,
        },
    }


def test_results_on_a_hybrid_model_stand_beside_those_of_the_version() -> None:
    refused = "MS304 noop-layers: the pattern says which layers a stage has\n  fix: remove noop-layers"
    cases = {
        "swiglu": {"holds": True, "problems": [], "alone": True},
        "noop-layers": {"holds": False, "problems": ["MS302 other", refused], "alone": True},
    }
    answers = {"megatron": "0.19.1", "python": "3.12.1", "torch": "2.13.0", "hybrid": True, "cases": cases}
    before = {"0.19.1": {"python": "3.12.1", "torch": "2.13.0", "features": {"swiglu": PASSED}}}
    row = with_versions(before, {"": answers})["0.19.1"]
    assert row["hybrid"] == {"noop-layers": "refused: the pattern says which layers a stage has", "swiglu": PASSED}
    assert row["features"] == {"swiglu": PASSED}
    again = with_versions({"0.19.1": row}, {"": answers | {"hybrid": False}})
    assert again["0.19.1"]["hybrid"] == row["hybrid"]


def test_a_feature_without_a_verdict_says_so() -> None:
    assert reason([]) == "fails: no verdict"


def test_the_version_that_a_feature_needs_is_told_before_its_other_problems() -> None:
    problems = [
        "MS205 piped needs one of a, b\n  fix: add one",
        ("MS208 piped needs megatron-core <0.17, but the version is 0.19.1\n  fix: another"),
    ]
    assert reason(problems) == "needs megatron-core <0.17"
