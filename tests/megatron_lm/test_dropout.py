"""Dropout under context parallelism in Megatron-LM's pretrain_gpt.py: a run that stops and goes on drops what one run would."""

from pathlib import Path
from shlex import split

import pytest

from tests.megatron_lm.checkout import Checkout

pytestmark = pytest.mark.long

DROPOUT = split("--attention-dropout 0.2 --hidden-dropout 0.2 --ckpt-format torch_dist")
"""Later on a command line than the zeros that all runs have."""
RING = split("--context-parallel-size 2 --features ring-attention")


def test_a_run_that_goes_on_drops_what_it_would_have(tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> list[tuple[str, str]]:
        (tmp_path / name).mkdir()
        return list(Checkout(tmp_path / name).adapted(2, *RING, *DROPOUT, *flags).ended_well().steps.values())

    saved = str(tmp_path / "saved")
    whole = run("whole", "--train-iters", "4")
    first = run("first", "--train-iters", "4", "--exit-interval", "2", "--save", saved, "--save-interval", "2")
    second = run("second", "--train-iters", "4", "--load", saved)
    assert first == whole[:2]
    assert second[0] == whole[2]
    # Megatron prints the mean of the first two losses after a start as the second one, but not so for the norm
    assert second[1][1] == whole[3][1]
    assert run("plain", "--train-iters", "1", "--hidden-dropout", "0")[0] != whole[0]
