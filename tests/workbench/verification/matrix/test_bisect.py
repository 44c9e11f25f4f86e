"""Bisect finds single culprits, pairs and settings, in few runs, by a tiny model or a command."""

import json
import sys
from collections.abc import Collection
from random import Random

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.workbench.verification.matrix.reduction import minimal


def asked(items: Collection[int], culprits: Collection[int]) -> tuple[tuple[int, ...], int]:
    """The smallest set that `minimal` finds when these culprits fail together, and the number of its different questions."""
    questions = {tuple(items)}

    def fails(some: tuple[int, ...]) -> bool:
        questions.add(tuple(sorted(some)))
        return set(culprits) <= set(some)

    return tuple(sorted(minimal(items, fails))), len(questions)


@pytest.mark.parametrize(("count", "limit"), [(1, 8), (2, 30), (3, 30)])
def test_every_set_of_culprits_among_twelve_is_found_in_few_questions(count: int, limit: int) -> None:
    chance = Random(0)
    for _ in range(200):
        culprits = sorted(chance.sample(range(12), count))
        found, questions = asked(range(12), culprits)
        assert list(found) == culprits
        assert questions <= limit


def test_where_failing_is_not_monotone_nothing_of_the_set_can_be_left_out() -> None:
    def fails(some: tuple[int, ...]) -> bool:
        return {3, 7} <= set(some) and (5 not in some or 6 in some)

    found = minimal(range(10), fails)
    assert fails(found)
    assert not any(fails(tuple(item for item in found if item != left)) for left in found)


TEST = """
import sys, yaml
job = yaml.safe_load(open(sys.argv[1]))
strong = job["settings"].get("swap-attention", {}).get("blocks")
sys.exit(125 if "tflops" in job["features"] and len(job["features"]) == 1 else eval(sys.argv[2]))
"""
JOB = """
features: [recompute, tflops, profiler, deterministic, async-ddp, distributed-optimizer, gloo-free-checkpoint]
settings: {profiler: {start: 3}}
platform: cpu
"""


@pytest.mark.parametrize(
    ("fails", "culprits"),
    [
        pytest.param("3 if 'async-ddp' in job['features'] else 0", ["async-ddp"], marks=pytest.mark.long),
        ("3 if {'recompute', 'deterministic'} <= set(job['features']) else 0", ["deterministic", "recompute"]),
        pytest.param("3 if job['settings'].get('profiler') else 0", ["profiler", "profiler.start=3"], marks=pytest.mark.long),
        ("0", []),
    ],
)
def test_a_command_judges_and_its_job_file_has_a_part_of_the_features(tmp_path, fails, culprits) -> None:
    script, job = tmp_path / "test.py", tmp_path / "job.yaml"
    script.write_text(TEST)
    job.write_text(JOB)
    command = f'{sys.executable} {script} {{job}} "{fails}"'
    words = ["features", "bisect", "-f", str(job), "--test", command, "--store", str(tmp_path / "s.jsonl"), "--json"]
    first = CliRunner().invoke(main, words, catch_exceptions=False)
    said = json.loads(first.stdout)
    assert (sorted(said["culprits"]), first.exit_code) == (culprits, 1 if culprits else 0)
    assert said["steady"]
    again = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert again["runs"] == (2 if culprits else 0)  # of which the repetitions: what was judged before is not run again


def test_a_command_that_does_not_end_is_a_failure(tmp_path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("features: [deterministic]\nplatform: cpu\n")
    words = ["features", "bisect", "-f", str(job), "--test", "sleep 60", "--timeout", "0.2", "--store", str(tmp_path / "s")]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.stdout.splitlines()[:2] == ["fails with: deterministic", "because: timeout the run did not end within 0.2 s"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "culprits"),
    [
        ({"x_mark": "marked", "y_beside": "beside-marked"}, ["x-mark", "y-beside"]),
        ({"x_raises": "raises"}, ["x-raises"]),
        ({"x_mark": "marked", "y_around": "goes-around"}, ["x-mark", "y-around"]),
        ({"x_mark": "marked", "y_after": "after-marked"}, ["x-mark", "y-after"]),
    ],
)
def test_a_tiny_model_shows_which_of_twelve_features_are_wrong_together(planted, tmp_path, kinds, culprits) -> None:
    planted(**{f"z_{number}": "harmless" for number in range(12 - len(kinds))}, **kinds)
    names = [f"z-{number}" for number in range(12 - len(kinds))] + [name.replace("_", "-") for name in kinds]
    words = ["features", "bisect", "--features", ",".join(names), "--platform", "cpu", "--store", str(tmp_path / "s"), "--json"]
    said = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert sorted(said["culprits"]) == culprits
    assert said["runs"] <= (30 if len(culprits) > 1 else 8) + 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "reason", "first"),
    [
        ("goes-around", "effect of a-mark: no patch target was called", ""),
        ("scales", "loss over 2 steps differs by", "step 1, loss"),
        ("not-finite", "is not finite", "step 1, loss"),
        ("crashes", "verification rank 0 ended with signal 6", ""),
        ("hangs", "ranks 0 of the verification run did not respond for 20 s", ""),
        ("raises", "RuntimeError: planted", ""),
    ],
)
def test_every_symptom_of_a_job_leads_to_its_culprit(planted, tmp_path, kind, reason, first) -> None:
    planted(a_mark="marked", b_wrong=kind, c_fine="harmless", d_fine="harmless", e_fine="harmless")
    words = ["features", "bisect", "--features", "a-mark,b-wrong,c-fine,d-fine,e-fine", "--platform", "cpu", "--timeout", "20"]
    said = json.loads(
        CliRunner().invoke(main, [*words, "--store", str(tmp_path / "s"), "--json"], catch_exceptions=False).stdout
    )
    assert sorted(said["culprits"]) == (["a-mark", "b-wrong"] if kind == "goes-around" else ["b-wrong"])
    assert reason in said["result"]["reason"]
    assert said["result"]["first"] == first
    assert said["steady"]


@pytest.mark.long
def test_what_is_wrong_only_in_a_layout_is_named_with_the_feature_of_that_layout(planted, tmp_path) -> None:
    planted(a_fine="harmless", b_fine="harmless", c_late="at-pp2")
    words = ["features", "bisect", "--features", "a-fine,b-fine,c-late,swiglu,pipeline-parallel", "--platform", "cpu"]
    said = json.loads(
        CliRunner().invoke(main, [*words, "--store", str(tmp_path / "s"), "--json"], catch_exceptions=False).stdout
    )
    assert sorted(said["culprits"]) == ["c-late", "pipeline-parallel"]


@pytest.mark.long
def test_a_setting_is_named_with_its_feature(planted, tmp_path) -> None:
    planted(a_fine="harmless", b_fine="harmless", c_fine="harmless")
    job = tmp_path / "job.yaml"
    job.write_text("features: [a-fine, b-fine, c-fine]\nsettings: {b-fine: {strength: 2}}\nplatform: cpu\n")
    words = ["features", "bisect", "-f", str(job), "--store", str(tmp_path / "s"), "--json"]
    said = json.loads(CliRunner().invoke(main, words, catch_exceptions=False).stdout)
    assert sorted(said["culprits"]) == ["b-fine", "b-fine.strength=2"]
