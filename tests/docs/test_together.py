"""Pages of features say with which others they work, by the published verdicts."""

from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.page import as_json, summary
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult
from tools.docs.together import together

RESULTS = [
    CaseResult(MatrixCase(("recompute", "swiglu")), CaseOutcome.HOLDS),
    CaseResult(MatrixCase(("rms-norm", "swiglu")), CaseOutcome.HOLDS),
    CaseResult(MatrixCase(("alibi", "swiglu")), CaseOutcome.REFUSED, "they hold one slot", "MS202"),
    CaseResult(MatrixCase(("coc", "swiglu")), CaseOutcome.REFUSED, "they hold one slot", "MS202"),
    CaseResult(MatrixCase(("swiglu", "tflops")), CaseOutcome.IDLE, "nothing to count"),
    CaseResult(MatrixCase(("swiglu",), "tp2"), CaseOutcome.HOLDS),
    CaseResult(MatrixCase(("swiglu",), "ep2"), CaseOutcome.REFUSED, "the model is dense", "MS203"),
    CaseResult(MatrixCase(("coc", "rms-norm")), CaseOutcome.FAILS, "another feature", "MS607"),
]
EXPECTED = """\
### Together with other features

Tested with a small model against unmodified Megatron; [the matrix](../matrix.html) shows the differences.

Works with: [recompute](recompute.md), [rms-norm](rms-norm.md).

One of the two features has no effect with: [tflops](tflops.md).

Is refused with:

- [alibi](alibi.md), [coc](coc.md): they hold one slot (MS202)

### In layouts

Works in: `tp2`.

Is refused:

- `ep2`: the model is dense (MS203)"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    known = {result.case.name: result for result in RESULTS}
    path = tmp_path / "matrix.json"
    path.write_text(as_json(summary(known, registry.catalog(), Sources(registry.catalog()))))
    return path


def test_a_page_has_the_other_features_by_verdict_and_those_of_one_reason_together(path: Path) -> None:
    assert "\n".join(together("swiglu", path)) == EXPECTED


def test_nothing_is_said_where_nothing_is_published(path: Path, tmp_path: Path) -> None:
    assert together("ampipe", path) == []
    assert together("swiglu", tmp_path / "absent.json") == []
