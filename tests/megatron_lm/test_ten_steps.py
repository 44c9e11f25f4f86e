"""Ten steps of pretrain_gpt.py in the layouts that jobs have most, against one stock process of the same checkout."""

from __future__ import annotations

from shlex import split

import pytest

LAYOUTS = {
    "one process": ("llama", 1, [], []),
    "tp2 with sequence parallelism": ("llama", 2, split("--tensor-model-parallel-size 2 --sequence-parallel"), []),
    "pp2": ("llama", 2, split("--pipeline-model-parallel-size 2"), []),
    "ring cp2": ("llama", 2, split("--context-parallel-size 2 --features ring-attention"), ["--calculate-per-token-loss"]),
    "ep2": ("moe", 2, split("--expert-model-parallel-size 2"), []),
    "dp2 with overlaps": ("llama", 2, split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"), []),
}
"""The model, the number of processes, their flags, and what stock is told because the plan sets it by itself."""
STEPS = 10


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_print_the_losses_of_stock(checkout, initial, stock, layout):
    model, nproc, flags, told = LAYOUTS[layout]
    steps = ["--train-iters", str(STEPS), "--lr-decay-iters", str(2 * STEPS)]
    run = checkout.adapted(nproc, *initial(model), *flags, *told, *steps).ended_well()
    assert run.losses == pytest.approx(stock(model, *told, *steps).losses, rel=5e-6)
    assert len(set(run.losses)) == STEPS, "the weights change"
    assert run.report["problems"] == []
