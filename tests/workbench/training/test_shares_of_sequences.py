"""Checkpoints of context parallelism: what one number of ranks saved another continues, and the other way round."""

import shutil

import pytest

from mindspeed.workbench.training.checkpoints import checkpoint_path
from tests.workbench.training.conftest import TINY, Run, log, losses


@pytest.mark.long
def test_a_checkpoint_does_not_know_how_many_ranks_shared_a_sequence(tmp_path, text):
    whole, shared, alone = (tmp_path / name for name in ("whole", "shared", "alone"))
    Run(*TINY, "--train-iters", 9, "--save-interval", 3, "--keep", 3, "--data", text, "--run", whole).done()
    for step in (9, 6):
        shutil.rmtree(checkpoint_path(whole, step))
    Run("--resume", whole, "--run", shared, "--nproc", 2, "--cp", 2, "--features", "ulysses-attention").done()
    shutil.rmtree(checkpoint_path(shared, 9))
    one = ("--nproc", 1, "--cp", 1, "--without", "context-parallel,ulysses-attention")
    Run("--resume", shared, "--run", alone, *one).done()
    assert sorted(losses(shared)) == [4, 5, 6, 7, 8, 9]
    assert sorted(losses(alone)) == [7, 8, 9]
    for step, loss in (*losses(shared).items(), *losses(alone).items()):
        assert loss == pytest.approx(losses(whole)[step], rel=1e-5)


@pytest.mark.long
def test_gradients_of_a_heavy_auxiliary_loss_do_not_know_it_either(tmp_path, text):
    def norms(name, *layout):
        experts = ("--num-experts", 4, "--aux-loss-coeff", 10)
        Run(*TINY, *experts, "--train-iters", 3, "--data", text, "--run", tmp_path / name, *layout).done()
        return [row["gradient_norm"] for row in log(tmp_path / name) if "gradient_norm" in row]

    alone = norms("alone")
    assert norms("shared", "--nproc", 2, "--cp", 2, "--features", "ulysses-attention") == pytest.approx(alone, rel=1e-5)
