"""``mindspeed features test NAME --pairs`` judges a distribution beside every built-in feature."""

import pytest
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.workbench.conformance import suite
from mindspeed.workbench.conformance.suite import pairs_of
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult


def test_a_distribution_has_pairs_with_every_built_in_feature_and_among_its_own(planted) -> None:
    planted(a_fine="harmless", b_raises="raises")
    built_in = [row.name for row in registry.catalog().usable.values() if row.distribution == BUILT_IN]
    features = [case.features for case in pairs_of("planted-ms")]
    assert len(features) == 2 * len(built_in) + 1
    assert ("a-fine", "b-raises") in features
    assert ("a-fine", "swiglu") in features
    assert len(pairs_of("swiglu")) == len(built_in) - 1


@pytest.mark.long
def test_pairs_without_a_fresh_verdict_are_judged_and_a_table_has_all(planted, store, monkeypatch) -> None:
    monkeypatch.setattr(suite, "examine", lambda name, parity: ())  # the suite is proven in tests/workbench/conformance
    planted(a_fine="harmless", b_raises="raises")
    sources = Sources(registry.catalog())
    with store.hold():
        for case in pairs_of("planted-ms"):
            if case.features not in [("a-fine", "b-raises"), ("a-fine", "swiglu")]:
                key = sources.key(case.features, *case.facts)
                store.add(CaseResult(case, CaseOutcome.HOLDS, involved=case.features, key=key))
    words = ["features", "test", "planted-ms", "--pairs", "--store", str(store.path)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "a-fine + b-raises fails MS607 verification rank 0 failed: RuntimeError: planted" in lines
    assert "a-fine + swiglu holds" in lines
    assert lines[-1] == f"planted-ms: {len(pairs_of('planted-ms'))} pairs, 1 failed"
    assert done.exit_code == 1
