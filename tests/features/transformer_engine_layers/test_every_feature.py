"""Every other feature on layers in the roles of Transformer Engine's: it holds, or a declared condition refuses it.

The results are kept for the support table: ``python -m tools.docs.results engine build/engine_layers`` takes them over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from mindspeed.problems import ResolutionError
from mindspeed.workbench.diagnostics.support_matrix import engine_results
from tests.conftest import Prove
from tests.features.resolving import CATALOG

NAME: Final = "transformer-engine-layers"
FOLDER: Final = Path(__file__).parents[3] / "build" / "engine_layers"
OTHERS: Final = sorted(set(CATALOG.usable) - {NAME})
REFUSED: Final = {
    "norm-recompute": ("norms are fused into the linear layers that follow them, but norm-recompute recomputes separate norms"),
}
"""Features that a declared condition refuses with their defaults, and its sentence."""


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_a_feature_holds_on_these_layers_or_is_refused(prove: Prove, name: str) -> None:
    result = "passed"
    try:
        if problems := prove(name, NAME).problems:
            result = f"fails: {problems[0]}"
    except ResolutionError as error:
        result = f"refused: {error.problems[0].message.removeprefix(f'{name}: ')}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    assert result == (f"refused: {REFUSED[name]}" if name in REFUSED else "passed")


def test_every_feature_has_a_result_on_these_layers() -> None:
    expected = {name: f"refused: {REFUSED[name]}" if name in REFUSED else "passed" for name in OTHERS}
    assert engine_results() == expected
