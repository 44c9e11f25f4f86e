"""`mindspeed patches follow` on small trees: a planted rename, body, parameter and native flag are found."""

from functools import partial
from pathlib import Path

import pytest

from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.plugins.feature import Category, FeatureSpec
from mindspeed.problems import MindSpeedError, Problem
from mindspeed.workbench.diagnostics.release_comparison import compare_releases, overlaps
from mindspeed.workbench.verification import bugs_on_checkout, claims_on_checkout
from mindspeed.workbench.verification.claims_on_checkout import Limits, Verifier, in_order, verify_on
from mindspeed.workbench.verification.following import Report, follow, markdown

UTILS = """\
def slice_batch(batch, group=None):
    share = batch[group.rank()]
    return share


def gather(shares, group):
    return sum(shares)


def kept(tokens, group):
    return tokens
"""
ARGUMENTS = """\
def add_arguments(parser):
    parser.add_argument("--tensor-model-parallel-size", type=int)
"""
TARGETS = [PatchTarget("demo", "mindspeed", f"megatron.core.utils:{name}") for name in ("slice_batch", "gather", "kept")]
SPECS = {"demo": FeatureSpec(name="demo", category=Category.COMPUTE)}
SPECS |= {name: FeatureSpec(name=name, category=Category.COMPUTE) for name in ("ring-attention", "swiglu")}


def tree(root: Path, version: str, utils: str = UTILS, arguments: str = ARGUMENTS) -> Path:
    core, training = root / "megatron" / "core", root / "megatron" / "training"
    for folder in (core, training):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    major, minor, patch = version.split(".")
    (core / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")
    (core / "utils.py").write_text(utils)
    (training / "arguments.py").write_text(arguments)
    return root


def found(tmp_path: Path, utils: str = UTILS, arguments: str = ARGUMENTS, version: str = "0.20.0") -> Report:
    old, new = tree(tmp_path / "old", "0.19.1"), tree(tmp_path / "new", version, utils, arguments)
    return follow(new, str(old), TARGETS, SPECS, lambda *_: tmp_path, tmp_path)


def test_a_planted_rename_is_gone_and_found_under_its_new_name(tmp_path: Path) -> None:
    report = found(tmp_path, UTILS.replace("def slice_batch", "def batch_of_rank"))
    rows = {row.target: row for row in report.comparisons if row.verdict != "same"}
    assert list(rows) == ["megatron.core.utils:slice_batch"]
    (row,) = rows.values()
    assert (row.verdict, row.near) == ("gone", ("megatron.core.utils:batch_of_rank",))
    assert not report.holds
    assert (
        "### gone: `megatron.core.utils:slice_batch`\n\ndemo\n\nnear names: `megatron.core.utils:batch_of_rank`\n"
        in markdown(report)
    )


def test_a_planted_change_of_a_body_is_a_diff_of_this_function_alone(tmp_path: Path) -> None:
    report = found(tmp_path, UTILS.replace("return sum(shares)", "return max(shares)"))
    (row,) = [row for row in report.comparisons if row.verdict != "same"]
    assert (row.target, row.verdict) == ("megatron.core.utils:gather", "body changed")
    assert row.diff.splitlines() == [
        "--- 0.19.1",
        "+++ 0.20.0",
        "@@ -1,2 +1,2 @@",
        " def gather(shares, group):",
        "-    return sum(shares)",
        "+    return max(shares)",
    ]
    assert report.holds
    assert f"```diff\n{row.diff}\n```" in markdown(report)


def test_other_parameters_are_named_beside_the_diff(tmp_path: Path) -> None:
    report = found(tmp_path, UTILS.replace("def gather(shares, group)", "def gather(shares, ranks)"))
    (row,) = [row for row in report.comparisons if row.verdict != "same"]
    assert (row.verdict, row.why) == ("changed", "parameters: +ranks, -group")
    assert row.diff
    assert not report.holds


def test_a_planted_native_flag_that_doubles_a_feature_is_named(tmp_path: Path) -> None:
    line = '    parser.add_argument("--use-ring-attention", action="store_true")\n'
    report = found(tmp_path, arguments=ARGUMENTS + line)
    assert report.overlaps == [("ring-attention", "use_ring_attention")]
    assert "- `use_ring_attention`: ring-attention\n" in markdown(report)


def test_an_argument_overlaps_with_all_words_of_a_name_and_not_with_some() -> None:
    features = {"ring-attention": (), "context-parallel": ("context_parallel_size",)}
    arguments = ("attention_backend", "hybrid_context_parallel", "rings_of_attention", "context_parallel_size")
    assert [*overlaps(features, arguments)] == [
        ("context-parallel", "context_parallel_size"),
        ("context-parallel", "hybrid_context_parallel"),
        ("ring-attention", "rings_of_attention"),
    ]


def test_a_recorded_release_gives_verdicts_without_diffs(tmp_path: Path) -> None:
    new = tree(tmp_path / "new", "0.21.0")
    targets = [PatchTarget("demo", "mindspeed", "megatron.core.utils:get_batch_on_this_cp_rank")]
    version, since, rows, _ = compare_releases(targets, {}, new)
    assert (version, since) == ("0.21.0", "0.20.0")
    assert [(row.verdict, row.diff) for row in rows] == [("gone", "")]


def test_a_target_for_other_releases_is_left_out(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old", "0.19.1"), tree(tmp_path / "new", "0.20.0")
    _, _, rows, _ = compare_releases([PatchTarget("demo", "mindspeed", TARGETS[0].target, ("<0.17",))], {}, new, str(old))
    assert rows == []


def test_what_cannot_be_recorded_is_a_note(tmp_path: Path) -> None:
    def refuse(*_: object) -> Path:
        raise MindSpeedError([Problem("MS502", "the command line cannot be read")])

    old, new = tree(tmp_path / "old", "0.19.1"), tree(tmp_path / "new", "0.20.0")
    report = follow(new, str(old), TARGETS, SPECS, refuse, tmp_path)
    assert [*report.notes] == ["MS502 the command line cannot be read"]


def test_a_claim_that_fails_is_a_row_with_its_problems(tmp_path: Path) -> None:
    rows = [{"feature": "demo", "holds": False, "problems": ["MS607 demo: loss differs"], "seconds": 1.0}]
    report = Report("0.20.0", "0.19.1", [], [], rows)
    assert not report.holds
    assert report.failed == ["demo"]
    assert "| demo | does not hold | no target |\n" in markdown(report)
    assert "### demo\n\n```\nMS607 demo: loss differs\n```\n" in markdown(report)


def test_a_bug_that_a_release_no_longer_has_or_has_again_is_named() -> None:
    shown, right, unknown = ({"state": state, "text": ""} for state in ("shown", "right", "not run"))
    seen = {
        "router-losses-per-token": {"without": shown},  # in releases before 0.19
        "sinkhorn-by-layout": {"without": right},  # in all releases
        "widths-of-latent-attention": {"without": shown, "with": shown},
        "steps-that-parameters-share": {"without": shown, "with": right},
        "compiler-of-cuda-at-start": {"without": unknown},
    }
    rows = bugs_on_checkout.rows_of(seen, "0.20.0")
    assert [row["verdict"] for row in rows] == [
        bugs_on_checkout.PRESENT,
        bugs_on_checkout.FIXED,
        bugs_on_checkout.UNMENDED,
        bugs_on_checkout.AS_LISTED,
        bugs_on_checkout.NOT_RUN,
    ]
    report = Report("0.20.0", "0.19.1", [], [], [], rows)
    assert not report.holds
    assert f"| sinkhorn-by-layout | {bugs_on_checkout.FIXED} | right |\n" in markdown(report)
    assert Report("0.20.0", "0.19.1", [], [], [], rows[3:]).holds


def test_without_its_tests_known_bugs_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bugs_on_checkout, "SOURCE", tmp_path)
    with pytest.raises(MindSpeedError, match="the tests that show bugs of Megatron are not installed"):
        bugs_on_checkout.bugs_on(tmp_path, "0.20.0", 1.0)


VERIFIER = """\
import json, os, sys, time
print(json.dumps({"megatron": "0.20.0"}), flush=True)
for line in sys.stdin:
    name = line.strip()
    print("a word of another library", flush=True)
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        sys.exit("Segmentation fault")
    print(json.dumps({"feature": name, "holds": True, "problems": [], "seconds": 1.0, "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script of the test stand for the process that verifies claims."""
    (tmp_path / "stand_in.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(claims_on_checkout, "Verifier", partial(Verifier, module="stand_in"))


def specs_of(*names: str, megatron: str = "") -> dict[str, FeatureSpec]:
    return {name: FeatureSpec(name=name, category=Category.COMPUTE, megatron=megatron) for name in names}


def test_a_claim_that_hangs_or_ends_its_process_is_a_row_and_the_next_one_is_verified(tmp_path: Path, verifier: None) -> None:
    rows = verify_on(tmp_path, "0.20.0", specs_of("first", "hangs", "second", "dies", "third"), Limits(1.0, 30.0, 1))
    assert [(row["feature"], row["holds"], row["problems"]) for row in rows] == [
        ("first", True, []),
        ("hangs", None, ["no verdict within 1 s"]),
        ("second", True, []),
        ("dies", False, ["the process that verifies claims ended with 1: Segmentation fault"]),
        ("third", True, []),
    ]
    assert len({row["pid"] for row in rows if row["holds"]}) == 3
    report = Report("0.20.0", "0.19.1", [], [], rows)
    assert report.failed == ["hangs", "dies"]
    assert "| hangs | no verdict within 1 s | no target |\n" in markdown(report)


def test_features_whose_turn_does_not_come_or_that_are_for_other_releases_are_rows(tmp_path: Path, verifier: None) -> None:
    specs = {**specs_of("late"), **specs_of("old", megatron="<0.17")}
    rows = verify_on(tmp_path, "0.20.0", specs, Limits(1.0, 0.0, 2))
    assert [(row["holds"], row["problems"]) for row in rows] == [
        (None, ["not verified: the time limit of 0 s was reached"]),
        (None, ["needs megatron-core <0.17"]),
    ]
    report = Report("0.20.0", "0.19.1", [], [], rows)
    assert report.failed == ["late"]
    assert "| late | not verified: the time limit of 0 s was reached | no target |\n" in markdown(report)
    assert "| old | needs megatron-core <0.17 | no target |\n" in markdown(report)


def test_two_processes_share_the_features(tmp_path: Path, verifier: None) -> None:
    rows = verify_on(tmp_path, "0.20.0", specs_of(*(f"f{n}" for n in range(40))), Limits(5.0, 30.0, 2))
    assert all(row["holds"] for row in rows)
    assert len({row["pid"] for row in rows}) == 2


def test_features_whose_targets_differ_most_are_verified_first() -> None:
    verdicts = {"a": ["same"], "b": ["body changed", "same"], "c": ["gone"], "d": ["appended"], "e": ["changed"]}
    assert in_order("abcdef", verdicts) == ["e", "c", "b", "d", "a", "f"]
