"""The matrix finds planted faults, and keeps every verdict until a source changes that the case can reach."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.problems import RunError
from mindspeed.workbench.verification.matrix.cases import (
    FEATURE_LAYOUTS,
    SWITCHES,
    MatrixCase,
    in_layouts,
    of_stock,
    pairs,
    resolves,
)
from mindspeed.workbench.verification.matrix.covering import by_verdicts, covering_sets
from mindspeed.workbench.verification.matrix.judge import judge
from mindspeed.workbench.verification.matrix.page import as_json, html, published, summary
from mindspeed.workbench.verification.matrix.reach import _ENTRANCES, Sources, code_of
from mindspeed.workbench.verification.matrix.run import judge_all, to_judge
from mindspeed.workbench.verification.matrix.store import VerdictStore, is_stale
from mindspeed.workbench.verification.matrix.verdicts import CaseOutcome, CaseResult, key_of, result_from_json
from mindspeed.workbench.verification.pool import WorkerPool
from tests.conftest import ROOT

FAULTS = {
    "a_mark": "marked",
    "b_after": "after-marked",
    "b_beside": "beside-marked",
    "c_late": "at-pp2",
    "e_around": "goes-around",
    "f_raises": "raises",
}
WRONG_TOGETHER = {
    "a-mark + b-beside": "gradient",
    "a-mark + b-after": "gradient",
    "a-mark + e-around": "effect",
    "c-late @ pp2": "gradient",
}


def judged(name: str, outcome: CaseOutcome = CaseOutcome.HOLDS, key: str = "") -> CaseResult:
    features, _, layout = name.partition(" @ ")
    return CaseResult(MatrixCase(tuple(features.split(" + ")), layout), outcome, involved=(), key=key)


@pytest.mark.long
def test_what_is_wrong_only_together_only_in_a_layout_or_without_effect_is_named(planted, store) -> None:
    planted(**FAULTS)
    sources = Sources(registry.catalog())
    cases = [MatrixCase(("a-mark", other)) for other in ("b-after", "b-beside", "e-around")]
    cases += [MatrixCase(("b-after", "b-beside")), MatrixCase(("b-after", "f-raises")), MatrixCase(("c-late",), "pp2")]
    found = {result.case.name: result for result in judge_all(cases, store, sources)}
    raised = found.pop("b-after + f-raises")
    assert (raised.outcome, raised.reason) == (CaseOutcome.FAILS, "verification rank 0 failed: RuntimeError: planted")
    wrong = {name: result.what or str(result) for name, result in found.items() if result.outcome is CaseOutcome.FAILS}
    assert {name: what.partition(" ")[0] for name, what in wrong.items()} == WRONG_TOGETHER
    assert to_judge(cases, store.read(), sources) == []


def stale_after(change, planted) -> list[str]:
    """The stale ones of three pairs after ``change`` of the source of b-fine."""
    source = planted(a_fine="harmless", b_fine="harmless", c_fine="harmless") / "planted_b_fine.py"
    before = Sources(registry.catalog())
    results = [
        CaseResult(case, CaseOutcome.HOLDS, involved=case.features, key=before.key(case.features, *case.facts))
        for case in pairs(("a-fine", "b-fine", "c-fine"))
    ]
    assert to_judge((result.case for result in results), {result.case.name: result for result in results}, before) == []
    change(source)
    after = Sources(registry.catalog())
    return [result.case.name for result in results if is_stale(result, after)]


def change_a_line(source: Path) -> None:
    source.write_text(source.read_text().replace("output * 1.5", "output * 1.25"))


def change_a_table(source: Path) -> None:
    source.with_suffix(".yaml").write_text("rows: 1\n")
    source.write_text(source.read_text() + "\n")


def change_comments_and_docstrings(source: Path) -> None:
    text = source.read_text().replace('"""A made-up feature."""', '"""Another text, which names mindspeed.features.swiglu."""')
    source.write_text(text.replace("def plain(original):", "# a reason\n\n\ndef plain(original):  # another one"))


@pytest.mark.parametrize("change", [change_a_line, change_a_table])
def test_a_changed_line_or_table_makes_stale_exactly_the_cases_that_can_reach_it(planted, change) -> None:
    assert stale_after(change, planted) == ["a-fine + b-fine", "b-fine + c-fine"]


def test_comments_and_docstrings_make_no_case_stale(planted) -> None:
    assert stale_after(change_comments_and_docstrings, planted) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('Field(0, description="Number of layers that are kept")', 'Field(0, description="How many layers are "\n  "kept")'),
        ('raise E(f"{rank} has no such file")', 'raise E(f"{rank} does not have it")'),
        (
            'raise E(f"{rank} of {size} is gone", fix=f"{fix}, or else")',
            'raise E(f"gone is {rank} of {size}", fix=f"maybe {fix}")',
        ),
        ('row("name", note="fewer")', 'row("name", note="fewer bytes")'),
        ("TABLE = {1: 'the first of two'}", "# all rows\nTABLE = {\n    1: 'the second of two',\n}"),
    ],
)
def test_a_sentence_and_a_layout_count_for_the_text_of_a_refusal_alone(before: str, after: str) -> None:
    assert code_of(before) == code_of(after)
    assert code_of(before, sentences=True) != code_of(after, sentences=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('x = "tp-cp-ep-dp-pp"', 'x = "tp-ep-dp-pp"'),
        ('einsum("s b h, h d -> s b d")', 'einsum("s b h, h d -> b s d")'),
        ('raise E(f"rank {rank} has no such file")', 'raise E(f"rank {other} has no such file")'),
    ],
)
def test_names_formulas_and_values_in_sentences_are_code(before: str, after: str) -> None:
    assert code_of(before) != code_of(after)


@pytest.mark.long
def test_other_words_make_only_refusals_stale(planted) -> None:
    source = planted(a_fine="harmless") / "planted_a_fine.py"
    case, facts = MatrixCase(("a-fine", "swiglu")), ("a-fine", "swiglu")
    before = Sources(registry.catalog())
    results = [CaseResult(case, outcome, involved=facts) for outcome in (CaseOutcome.HOLDS, CaseOutcome.REFUSED)]
    results = [replace(result, key=key_of(result, before)) for result in results]
    source.write_text(source.read_text() + '\nTEXT = "a sentence of four words"\n')
    kept = [replace(result, key=key_of(result, Sources(registry.catalog()))) for result in results]
    source.write_text(source.read_text().replace("four words", "other words"))
    after = Sources(registry.catalog())
    assert [is_stale(result, before) for result in results] == [False, False]
    assert [is_stale(result, after) for result in kept] == [False, True]


def test_a_case_of_a_feature_or_layout_that_is_gone_is_stale(sources) -> None:
    assert all(is_stale(judged(name), sources) for name in ("gone + swiglu", "swiglu @ gone"))


@pytest.mark.long
def test_a_source_of_a_library_reaches_the_features_that_import_it_and_no_others(sources) -> None:
    reached = {name: sources._reached(sources._of_feature(name)) for name in ("ring-attention", "swiglu")}
    assert "mindspeed.context_parallel.ring" in reached["ring-attention"]
    assert "mindspeed.features.ring_attention.feature" not in reached["swiglu"]
    assert "mindspeed.registry" in sources._reached(["mindspeed.workbench.verification.harness"])


def trained_with_modules(recipe) -> list[str]:
    """Train in a worker, and name the modules that it has imported by then."""
    import mindspeed.workbench.verification.training  # Megatron is there in workers alone

    mindspeed.workbench.verification.training.train(recipe)
    return list(sys.modules)


@pytest.mark.long
@pytest.mark.parametrize("names", [("recompute", "tflops"), ("rms-norm", "swap-optimizer")])
def test_no_worker_imports_what_counts_as_not_reached(names, sources) -> None:
    case = MatrixCase(names).build()
    with WorkerPool([str(ROOT)]) as pool:  # a worker of the test run may have imported anything
        (imported,) = pool.call(trained_with_modules, 1, case.recipe, plan=case.plan)
    assert "mindspeed.megatron_lm.training_plan" in sources._files
    assert "mindspeed.registry" in imported
    assert [name for name in imported if _ENTRANCES.match(name)] == []


def test_failing_and_stale_cases_come_before_those_that_were_never_judged(sources) -> None:
    cases = list(pairs(("recompute", "rms-norm", "swiglu")))
    names = [case.name for case in cases]
    known = {names[1]: judged(names[1]), names[2]: judged(names[2], CaseOutcome.FAILS)}
    assert [case.name for case in to_judge(cases, known, sources)] == [names[2], names[1], names[0]]


def test_a_torn_last_line_is_no_verdict_and_the_next_one_begins_a_line(store) -> None:
    with store.hold():
        store.add(judged("rms-norm + swiglu"))
    with store.path.open("a") as file:
        file.write('{"name": "torn')
    assert list(store.read()) == ["rms-norm + swiglu"]
    with store.hold():
        store.add(judged("recompute + swiglu"))
    assert list(store.read()) == ["rms-norm + swiglu", "recompute + swiglu"]


def test_a_file_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"format": 0}\n')
    with pytest.raises(RunError, match="MS602 the file of stored test results cannot be read"), VerdictStore(path).hold():
        pass
    assert path.read_text() == '{"format": 0}\n'


def test_two_writers_do_not_share_a_store(store) -> None:
    with store.hold():
        store.add(judged("rms-norm + swiglu"))
        with pytest.raises(RunError, match="MS608 another mindspeed command"), VerdictStore(store.path).hold():
            pass
    assert list(store.read()) == ["rms-norm + swiglu"]


def test_there_is_a_case_for_every_pair_and_every_feature_in_every_layout() -> None:
    names = registry.catalog().usable
    assert len({case.name for case in pairs(names)}) == len(names) * (len(names) - 1) // 2
    layouts = [case for case in in_layouts(names) if case.features == ("rms-norm",)]
    assert [case.layout for case in layouts] == list(FEATURE_LAYOUTS)
    ring = [case for case in in_layouts(["ring-attention"]) if "cp2" in case.layout]
    assert [case.tested for case in ring] == [("ring-attention",)] * 2  # alone and beside tp: the other algorithm has its slot
    assert {case.switch for case in of_stock()} == SWITCHES.keys()


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [("rms-norm", "dp2-sharded", 2), ("hybrid-attention", "dp2-sharded", 8), ("hybrid-attention", "tp2-pp2", 16)],
)
def test_a_layout_has_the_ranks_that_a_feature_declares(name: str, layout: str, ranks: int) -> None:
    assert MatrixCase((name,), layout).build().plan.world.world_size == ranks


def test_a_verdict_is_read_as_it_was_written() -> None:
    result = CaseResult(MatrixCase(("rms-norm",), "tp2", given={"seq_length": 8}), CaseOutcome.FAILS, "why", "MS607", ratio=2.5)
    assert result_from_json(json.loads(json.dumps(result.to_json()))) == result


APART = {
    "a_mark": "marked",
    "b_beside": "beside-marked",
    "c_late": "at-pp2",
    "d_order": "marked-attention",
    "e_after": "after-marked-attention",
    "f_effect": "harmless-projection",
    "g_around": "goes-around-projection",
}
"""Planted faults that do not touch one another."""


@pytest.mark.long
def test_the_sets_of_a_covering_array_name_every_planted_fault_as_their_smallest_part(planted, store) -> None:
    planted(**APART)
    names = [name.replace("_", "-") for name in APART]
    sets = covering_sets([*names, "pipeline-parallel", "swiglu"], 2, 4, resolves)
    found = judge_all([MatrixCase(some) for some in sets], store, Sources(registry.catalog()))
    wrong = [("a-mark", "b-beside"), ("c-late", "pipeline-parallel"), ("d-order", "e-after"), ("f-effect", "g-around")]
    named = {result.case.name: result.culprits or result.case.features for result in found if result.outcome.is_defect}
    assert set(named.values()) == set(wrong)
    assert {r.outcome for r in found if not any(set(r.case.features) >= {*pair} for pair in wrong)} == {CaseOutcome.HOLDS}


@pytest.mark.parametrize("strength", [2, 3])
def test_in_the_sets_of_a_covering_array_all_features_meet_that_can(strength: int) -> None:
    from itertools import combinations

    names = [f"f{number}" for number in range(12)]

    def resolves(some) -> bool:
        return not {"f1", "f2"} <= set(some)

    sets = covering_sets(names, strength, 6, resolves)
    met = {frozenset(some) for made in sets for some in combinations(made, strength)}
    assert met == {frozenset(some) for some in combinations(names, strength) if resolves(some)}
    assert all(len(made) <= 6 and resolves(made) for made in sets)
    assert len(sets) <= {2: 9, 3: 24}[strength]


SMALL = (
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
    sources = Sources(registry.catalog())
    sets = covering_sets(SMALL, 2, 5, resolves)
    found = {result.case.name: result for result in (judge(MatrixCase(some), pool, sources) for some in sets)}
    assert len(found) >= 4
    assert {name: result.reason for name, result in found.items() if result.outcome is not CaseOutcome.HOLDS} == {}


def test_a_set_with_a_verdict_is_not_planned_to_know_whether_its_features_meet() -> None:
    planned: list[Sequence[str]] = []
    known = {name: judged(name, outcome) for name, outcome in (("a + b", CaseOutcome.REFUSED), ("a + c", CaseOutcome.FAILS))}
    meet = by_verdicts(known, lambda names: planned.append(names) or True)
    assert [meet(names) for names in (["a", "b"], ["a", "c"], ["b", "c"])] == [False, True, True]
    assert planned == [["b", "c"]]


def test_the_page_holds_every_verdict_and_needs_no_other_file(sources, tmp_path) -> None:
    known = {name: judged(name) for name in ("rms-norm + swiglu", "swiglu @ tp2")}
    stock = CaseResult(MatrixCase((), "tp2-sp", switch="aux-loss"), CaseOutcome.FAILS, "why", "MS607", what="loss", ratio=2.5)
    known[stock.case.name] = stock
    searched = CaseResult(MatrixCase(("swiglu",), given={"tp": 2}), CaseOutcome.HOLDS)
    data = summary(known | {searched.case.name: searched}, registry.catalog(), sources)
    assert (data["verdicts"]["holds"], data["stock"]["fails"], data["stale"]) == (2, 1, 3)
    (tmp_path / "matrix.json").write_text(as_json(data), encoding="utf-8")
    assert published(tmp_path / "matrix.json") == {}, "a stale verdict is none"
    (tmp_path / "matrix.json").write_text(as_json(data).replace(', "stale": true', ""), encoding="utf-8")
    assert published(tmp_path / "matrix.json") == known
    assert published(tmp_path / "absent.json") == {}
    assert "reason" not in data["cases"][0]  # what is empty takes no place
    page = html(data)
    assert '"rms-norm + swiglu"' in page
    assert '"aux-loss":"tests/megatron/stock_loss_weights.py"' in page
    assert "src=" not in page
    assert all(link.endswith("index.html") or link == "together.html" for link in re.findall(r'href="([^"]*)"', page))


def test_every_reproduction_of_a_stock_disagreement_is_a_file_of_the_repository(sources) -> None:
    data = summary({}, registry.catalog(), sources)
    named = {*data["reproductions"].values(), *(row["reproduction"] for row in data["elsewhere"])}
    assert named >= {"tests/megatron/stock_loss_weights.py", "tests/megatron/stock_tensor_parallel.py"}
    assert [name for name in named if not (ROOT / name).is_file()] == []
