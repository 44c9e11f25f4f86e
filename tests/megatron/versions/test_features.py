"""Every feature, and the layouts that belong together, proven on every Megatron version that is at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed.engine.inspection.megatron_copies import version_of
from mindspeed.engine.resolution.environment import version_in
from tests.megatron.versions.cases import CASES, SPECS
from tests.megatron.versions.conftest import Megatron

pytestmark = pytest.mark.long


def test_the_version_under_test_is_the_one_that_runs(megatron: Megatron, answers: Mapping[str, Any]) -> None:
    assert (answers["megatron"], Path(answers["root"])) == (
        version_of(megatron.folder / "megatron"),
        megatron.folder / "megatron",
    )
    assert Path(answers["imported"]) == megatron.folder / "megatron" / "core" / "__init__.py"


@pytest.mark.parametrize("name", CASES)
def test_a_feature_does_what_it_claims(megatron: Megatron, answers: Mapping[str, Any], name: str) -> None:
    answer = answers["cases"][name]
    if refusal := refused_on(name, answers["megatron"]):
        assert [problem for problem in answer["problems"] if problem.startswith(refusal)]
        pytest.skip(refusal)
    assert answer["problems"] == []
    assert answer["holds"]
    assert set(CASES[name].features) <= set(answer["features"])
    if CASES[name].features == ("recompute",):
        assert set(answer["largest"].values()) == {0.0}


def refused_on(name: str, version: str) -> str:
    """The beginning of the refusal of a feature that is not for this version, empty for one that is."""
    needed = SPECS[name].megatron if name in SPECS else ""
    return "" if version_in(version, needed) else f"MS208 {name} needs megatron-core {needed}, but the version is {version}"
