"""Capacity-gated experts, saved in one layout and resumed in another one, with equal groups of tokens."""

import shutil
from pathlib import Path

import pytest

from mindspeed.workbench.training.checkpoints import checkpoint_path, find_checkpoint
from tests.workbench.training.conftest import TINY, Run, losses

pytestmark = pytest.mark.long

EXPERTS = (
    *("--style", "llama", "--num-experts", 4, "--router-topk", 2, "--aux-loss-coeff", 0.01),
    *("--features", "deepspeed-moe,deepspeed-moe-rearrange", "--set", "deepspeed-moe.capacity_factor=0.75"),
)


def saved_at_step_3(run: Path, text: str, *layout: object) -> dict[int, float]:
    """Train six steps, and leave the checkpoint of the third one. Returns the losses."""
    Run(*TINY, *EXPERTS, *layout, "--data", text, "--run", run, "--train-iters", 6, "--save-interval", 3).done()
    shutil.rmtree(checkpoint_path(run, 6))
    return losses(run)


def assert_continued(run: Path, rest: Path) -> None:
    whole, resumed = losses(run), losses(rest)
    assert sorted(resumed) == [4, 5, 6]
    assert [resumed[step] for step in (4, 5, 6)] == pytest.approx([whole[step] for step in (4, 5, 6)], rel=1e-5)
    assert resumed[4] < whole[1] - 0.2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--nproc 4 --ep 2 --pp 2", "--nproc 2 --pp 1"),
        ("--nproc 2 --ep 2 --global-batch-size 8", "--nproc 4 --ep 4"),
        ("--nproc 4 --ep 2 --tp 2", "--nproc 2 --tp 1"),
    ],
)
def test_another_layout_continues_the_curve(tmp_path: Path, text: str, before: str, after: str) -> None:
    run, rest = tmp_path / "run", tmp_path / "rest"
    saved_at_step_3(run, text, *before.split(), "--set", "deepspeed-moe.groups=4")
    Run("--resume", run, "--run", rest, *after.split()).done()
    assert_continued(run, rest)


def test_other_groups_are_refused_before_a_process_starts(tmp_path: Path, text: str) -> None:
    run, rest = tmp_path / "run", tmp_path / "rest"
    saved_at_step_3(run, text, "--nproc", 2, "--ep", 2, "--set", "deepspeed-moe.groups=4")
    refused = Run("--resume", run, "--run", rest, "--nproc", 2, "--set", "deepspeed-moe.groups=2").done(status=1)
    assert refused.err == (
        "MS613 deepspeed-moe.groups changed from 4 to 2: the number of groups decides which tokens are dropped\n"
        f"  where: {find_checkpoint(run)}\n"
        "  fix: --set deepspeed-moe.groups=4\n"
    )


def test_groups_that_follow_from_the_layout_are_kept_by_the_line_of_the_refusal(tmp_path: Path, text: str) -> None:
    run, rest = tmp_path / "run", tmp_path / "rest"
    saved_at_step_3(run, text, "--nproc", 2, "--tp", 2)
    layout = ("--resume", run, "--run", rest, "--nproc", 2, "--tp", 1)
    refused = Run(*layout).done(status=1)
    assert (
        "MS304 deepspeed-moe: the checkpoint was trained with 2 groups of tokens per micro-batch, but this run has 1\n"
        "  fix: --set deepspeed-moe.groups=2\n"
    ) in refused.err
    shutil.rmtree(rest, ignore_errors=True)
    Run(*layout, "--set", "deepspeed-moe.groups=2").done()
    assert_continued(run, rest)
