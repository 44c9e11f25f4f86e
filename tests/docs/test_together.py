"""Pages of features say with which others they work, by the published verdicts."""

from mindspeed.workbench.pages.together import together
from mindspeed.workbench.verification.matrix.cases import MatrixCase
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult

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
CATEGORIES = {"alibi": "scenario", "coc": "communication", "recompute": "memory", "rms-norm": "compute", "tflops": "tool"}
EXPECTED = """\
### Together with other features

Tested with a small model against unmodified Megatron; [the matrix](../matrix.html) has all features.

|  | works | one has no effect | refused |
|---|---|---|---|
| communication |  |  | [coc](coc.md) |
| compute | [rms-norm](rms-norm.md) |  |  |
| memory | [recompute](recompute.md) |  |  |
| scenario |  |  | [alibi](alibi.md) |
| tool |  | [tflops](tflops.md) |  |
| layouts | `tp2` |  | `ep2` |

Reasons:

- [alibi](alibi.md), [coc](coc.md): they hold one slot (MS202)
- `ep2`: the model is dense (MS203)"""


VERDICTS = {result.case.name: result for result in RESULTS}


def test_a_page_has_the_other_features_by_verdict_and_those_of_one_reason_together() -> None:
    assert "\n".join(together("swiglu", VERDICTS, CATEGORIES)) == EXPECTED


def test_nothing_is_said_without_a_verdict() -> None:
    assert together("ampipe", VERDICTS, CATEGORIES) == []
    assert together("swiglu", {}, CATEGORIES) == []
