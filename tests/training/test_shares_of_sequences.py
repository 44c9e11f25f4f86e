"""Checkpoints of context parallelism: what one number of ranks saved another continues, by another algorithm too."""

from __future__ import annotations

import shutil

import pytest

from mindspeed.training.checkpoints import checkpoint_path
from tests.training.conftest import TINY, Run, losses


@pytest.mark.long
def test_a_checkpoint_does_not_know_how_many_ranks_shared_a_sequence(tmp_path, text):
    whole, one, two = (tmp_path / name for name in ("whole", "one", "two"))
    steps = ("--train-iters", 9, "--save-interval", 3, "--keep", 3)
    Run(*TINY, "--nproc", 2, "--cp", 2, "--features", "ring-attention", *steps, "--data", text, "--run", whole).done()
    for step in (9, 6):
        shutil.rmtree(checkpoint_path(whole, step))
    alone = ("--nproc", 1, "--cp", 1, "--without", "context-parallel,ring-attention")
    Run("--resume", whole, "--run", one, *alone).done()
    shutil.rmtree(checkpoint_path(one, 9))
    Run("--resume", one, "--run", two, "--nproc", 2, "--cp", 2, "--features", "ulysses-attention").done()
    assert sorted(losses(one)) == [4, 5, 6, 7, 8, 9]
    assert sorted(losses(two)) == [7, 8, 9]
    for step, loss in (*losses(one).items(), *losses(two).items()):
        assert loss == pytest.approx(losses(whole)[step], rel=1e-5)
