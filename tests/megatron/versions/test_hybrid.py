"""Every feature on Megatron's HybridModel: it holds, or a declared condition refuses it.

The results are kept for the support table: ``python -m tools.docs.results versions build/hybrid`` takes them over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.version import Version

from mindspeed.engine.inspection.megatron_copies import version_of
from mindspeed.workbench.diagnostics.support_matrix import version_results
from tests.megatron.versions.cases import SPECS
from tests.megatron.versions.conftest import ROOT, Megatron
from tools.docs.results import PASSED, result_of

RESULTS: Final = ROOT / "build" / "hybrid"
FIRST: Final = Version("0.19")
_OLD: Final = "needs megatron-core >=0.14,<0.17"
REFUSED: Final = {
    **dict.fromkeys(("ampipe", "deepspeed-moe", "deepspeed-moe-dropless", "deepspeed-moe-rearrange", "pipe-experts"), _OLD),
    "dualpipev": "refused: dualpipev does not support a HybridModel, whose layers Megatron assigns to ranks by the pattern",
    "noop-layers": "refused: the pattern of a hybrid model already assigns layers to pipeline stages",
    "norm-recompute": (
        "refused: norms are fused into the linear layers that follow them, but norm-recompute recomputes separate norms"
    ),
}
"""Features that do not run on a HybridModel with their defaults, and why."""
EXPECTED: Final = {name: REFUSED.get(name, PASSED) for name in SPECS}


@pytest.fixture(scope="module")
def hybrid_answers(megatron: Megatron) -> Mapping[str, Any]:
    """What `verify_cases` prints beside this Megatron with hybrid models."""
    version = version_of(megatron.folder / "megatron")
    if version is None or Version(version) < FIRST:
        pytest.skip(f"megatron-core {version} has no HybridModel that takes the place of GPTModel")
    script = str(Path(__file__).with_name("verify_cases.py"))
    printed = megatron.run(script, "--hybrid").splitlines()[-1]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{megatron.version}.json").write_text(printed, encoding="utf-8")
    answers: Mapping[str, Any] = json.loads(printed)
    return answers


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_a_feature_holds_on_a_hybrid_model_or_is_refused(hybrid_answers: Mapping[str, Any], name: str) -> None:
    assert result_of(name, hybrid_answers["cases"][name]) == EXPECTED[name]


def test_every_feature_has_a_result_on_a_hybrid_model_in_each_release_that_has_one() -> None:
    found = {version: row.get("hybrid") for version, row in version_results().items() if Version(version) >= FIRST}
    assert found
    assert found == dict.fromkeys(found, EXPECTED)
