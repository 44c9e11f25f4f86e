"""Megatron-LM's pretrain_gpt.py with packed documents that do not see one another, against stock with its dense mask."""

from __future__ import annotations

from shlex import split

import pytest

pytestmark = pytest.mark.long

RESET = ["--reset-position-ids", "--reset-attention-mask"]
PER_TOKEN = "--calculate-per-token-loss"
LAYOUTS = {
    "one": (1, ""),
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "ring": (2, "--context-parallel-size 2 --features ring-attention"),
    "Ulysses": (2, "--context-parallel-size 2 --features ulysses-attention"),
    "stages in between": (4, "--pipeline-model-parallel-size 4"),
    "interleaved": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "tensor and stages": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "ring and stages": (4, "--context-parallel-size 2 --features ring-attention --pipeline-model-parallel-size 2"),
    "ring and recompute": (
        2,
        "--context-parallel-size 2 --features ring-attention --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_documents_matter(stock, model):
    assert stock(model, PER_TOKEN).losses != pytest.approx(stock(model, PER_TOKEN, *RESET).losses, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_flags_of_megatron_keep_documents_apart_in_every_layout(checkout, initial, stock, layout):
    nproc, flags = LAYOUTS[layout]
    run = checkout.adapted(nproc, *initial("gpt"), "--train-iters", "4", PER_TOKEN, *RESET, *split(flags)).ended_well()
    assert run.losses == pytest.approx(stock("gpt", PER_TOKEN, *RESET).losses, rel=1e-5)
    norms = [[float(norm) for _, norm in one.steps.values()] for one in (run, stock("gpt", PER_TOKEN, *RESET))]
    assert norms[0] == pytest.approx(norms[1], abs=1.1e-3)
    assert run.report["problems"] == []


def test_rotary_positions_may_go_on(checkout, initial, stock):
    flags = [PER_TOKEN, "--reset-attention-mask"]
    run = checkout.adapted(2, *initial("llama"), "--train-iters", "4", *flags, *split(LAYOUTS["ring"][1])).ended_well()
    assert run.losses == pytest.approx(stock("llama", *flags).losses, rel=1e-5)
