"""Every feature, and the layouts that belong together, proven on every Megatron version that is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.versions.cases import CASES, FEATURES
from tests.megatron.versions.conftest import Megatron

pytestmark = pytest.mark.long


def test_the_version_under_test_is_the_one_that_runs(megatron: Megatron, answers: Mapping[str, Any]) -> None:
    assert (answers["megatron"], Path(answers["root"])) == (megatron.version, megatron.folder / "megatron")
    assert Path(answers["imported"]) == megatron.folder / "megatron" / "core" / "__init__.py"


@pytest.mark.parametrize("name", CASES)
def test_a_feature_does_what_it_claims(answers: Mapping[str, Any], name: str) -> None:
    answer = answers["cases"][name]
    assert answer["problems"] == []
    assert answer["holds"]
    assert set(CASES[name].features) <= set(answer["features"])
    if CASES[name].features == ("recompute",):
        assert set(answer["largest"].values()) == {0.0}


def test_all_features_are_among_the_cases() -> None:
    assert {name for case in CASES.values() for name in case.features} == set(FEATURES)
