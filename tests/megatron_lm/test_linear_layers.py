"""Megatron-LM's pretrain_gpt.py on four processes with the linear layers of each feature, against one stock process."""

from __future__ import annotations

from shlex import split

import pytest

CASES = {
    "coc": split("--tensor-model-parallel-size 2 --sequence-parallel --features coc --set coc.parts=2"),
    "mc2": split("--tensor-model-parallel-size 4 --features mc2"),
    "tensor-parallel-2d": split(
        "--tensor-model-parallel-size 4 --features tensor-parallel-2d --set tensor-parallel-2d.x=2 --set tensor-parallel-2d.y=2"
    ),
    "old flags": split("--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2 --enable-overlap-ag-with-matmul"),
}


FURTHER = [("coc", "further"), ("tensor-parallel-2d", "further")]


@pytest.mark.long
@pytest.mark.parametrize(("case", "model"), [*((case, "llama") for case in CASES), *FURTHER])
def test_it_trains_as_one_stock_process_from_the_checkpoint_of_one_process(checkout, initial, stock, case, model):
    """The model with further parts has multi-token prediction."""
    run = checkout.adapted(4, *initial(model), *CASES[case], "--train-iters", "4").ended_well()
    assert run.losses == pytest.approx(stock(model).losses, rel=1e-5)
    name = "tensor-parallel-2d" if case == "old flags" else case
    reached = {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}
    assert name in reached
