"""The verdicts of docs/matrix.json are those of this source: by resolving here, and by runs in the long tests."""

import random
from pathlib import Path
from typing import Final

import pytest

from mindspeed import registry
from mindspeed.engine.planning import build_plan
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems.problem import ResolutionError
from mindspeed.workbench.verification import case as verification_case
from mindspeed.workbench.verification.matrix.cases import MatrixCase, pairs, resolves
from mindspeed.workbench.verification.matrix.covering import covering_sets
from mindspeed.workbench.verification.matrix.page import as_json, published, summary
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult, judge
from tests import stale_verdicts

PUBLISHED: Final = Path(__file__).parents[4] / "docs" / "matrix.json"
PART: Final = 6
"""One pair of so many is resolved in the default run."""
SAMPLE: Final = 20
TWO_VALUES: Final = "MS402"
"""Two values of an argument of Megatron are found together with patches, which the long test plans."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, CaseResult]:
    if not PUBLISHED.exists():
        pytest.skip("docs/matrix.json does not exist; mindspeed features matrix page writes it")
    return published(PUBLISHED.read_text(encoding="utf-8"))


def without_patches(resolution, known, environment, framework) -> ActivationPlan:
    """A plan that ends with what is resolved: patches take most of the time of planning, and refuse none of these pairs."""
    return ActivationPlan(
        features=resolution.features,
        world=resolution.world,
        level=resolution.level,
        base=resolution.base,
        overrides=(),
        patches=(),
        rows=resolution.rows,
        environment=environment.versions(),
    )


def refused_here(cases: list[MatrixCase]) -> set[str]:
    """The names of those cases that are refused, on the side with the features."""
    environment = registry.probe("cpu")

    def is_refused(case: MatrixCase) -> bool:
        try:
            verification_case.build_case(case.tested, [Layer("test", world=case.world)], environment=environment)
        except ResolutionError:
            return True
        return False

    return {case.name for case in cases if is_refused(case)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_plan, "build_plan", without_patches)
    monkeypatch.setattr(verification_case, "_case", lambda request, plan, recipe: plan)


@pytest.mark.budget(10)
def test_the_pairs_that_are_refused_here_are_those_that_are_published_as_refused(verdicts, quick) -> None:
    every = [case for case in pairs(registry.catalog().usable) if case.name in verdicts]
    some = random.Random(0).sample(every, len(every) // PART)
    some = [case for case in some if verdicts[case.name].code != TWO_VALUES]
    refused = {case.name for case in some if verdicts[case.name].outcome is CaseOutcome.REFUSED}
    here = refused_here(some)
    assert (sorted(here - refused), sorted(refused - here)) == ([], []), "refused only here, refused only where it is published"


def test_every_pair_of_built_in_features_is_published(verdicts) -> None:
    assert sorted({case.name for case in pairs(registry.catalog().usable)} - verdicts.keys()) == []


@pytest.mark.long
def test_every_pair_that_is_planned_whole_is_refused_where_it_is_published_as_refused(verdicts) -> None:
    every = [case for case in pairs(registry.catalog().usable) if case.name in verdicts]
    refused = {case.name for case in every if verdicts[case.name].outcome is CaseOutcome.REFUSED}
    here = {case.name for case in every if not resolves(case.features)}
    assert (sorted(here - refused), sorted(refused - here)) == ([], []), "refused only here, refused only where it is published"


SMALL: Final = (
    "flash-attention",
    "matmul-add",
    "recompute",
    "rms-norm",
    "rotary-embedding",
    "sequence-parallel",
    "swap-attention",
    "swiglu",
)


@pytest.mark.long
def test_the_sets_of_a_small_covering_array_hold(pool) -> None:
    sets = covering_sets(SMALL, 2, 5, resolves)
    sources = Sources(registry.catalog())
    found = {result.case.name: result for result in (judge(MatrixCase(some), pool, sources) for some in sets)}
    assert len(found) >= 4
    assert {name: result.reason for name, result in found.items() if result.outcome is not CaseOutcome.HOLDS} == {}


@pytest.mark.long
def test_twenty_random_cells_that_are_judged_again_have_the_published_verdict(verdicts, pool) -> None:
    sources = Sources(registry.catalog())
    chosen = random.SystemRandom().sample(sorted(verdicts), min(SAMPLE, len(verdicts)))
    found = {name: judge(verdicts[name].case, pool, sources) for name in chosen}
    assert {name: (result.outcome, result.code) for name, result in found.items()} == {
        name: (verdicts[name].outcome, verdicts[name].code) for name in chosen
    }


def test_the_summary_of_a_run_counts_the_verdicts_that_are_stale(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    assert stale_verdicts.summary(path) == "matrix.json does not exist: no verdict of the matrix is published"
    sources = Sources(registry.catalog())
    fresh, stale = MatrixCase(("rms-norm",), "tp2"), MatrixCase(("swiglu",), "tp2")
    known = {
        fresh.name: CaseResult(fresh, CaseOutcome.HOLDS, key=sources.key((), *fresh.facts)),
        stale.name: CaseResult(stale, CaseOutcome.HOLDS, key="of other sources"),
    }
    path.write_text(as_json(summary(known, registry.catalog(), sources)))
    assert (
        stale_verdicts.summary(path)
        == "matrix.json: 1 of 2 verdicts are stale; mindspeed features matrix run judges these again"
    )
