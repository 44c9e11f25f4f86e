"""Megatron-LM's pretrain_gpt.py in every layout, with the one import line, against one stock process."""

from __future__ import annotations

import re
from shlex import split

import pytest

TP_SP = split("--tensor-model-parallel-size 2 --sequence-parallel")
VPP = split("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2")
TP_PP = split("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
DP = split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
EP = split("--expert-model-parallel-size 2")

LAYOUTS = {
    "one": ("llama", 1, [], set()),
    "tp2-sp": ("llama", 2, TP_SP, {"tensor-parallel", "sequence-parallel"}),
    "pp2-vpp2": ("llama", 2, VPP, {"pipeline-parallel", "virtual-pipeline"}),
    "tp2-pp2": ("llama", 4, TP_PP, {"tensor-parallel", "pipeline-parallel"}),
    "dp2": ("llama", 2, DP, {"distributed-optimizer", "async-ddp", "async-param-gather"}),
    "ep2": ("moe", 2, EP, {"expert-parallel"}),
    "ep2-alltoall": ("moe", 2, [*EP, "--moe-token-dispatcher-type", "alltoall"], {"expert-parallel"}),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.guards(16, 48, processes=True)
def test_a_layout_trains_as_one_stock_process_does_and_every_feature_is_reached(checkout, initial, stock, layout):
    model, nproc, flags, features = LAYOUTS[layout]
    run = checkout.adapted(nproc, *initial(model), *flags, "--train-iters", "4", "--features", "rms-norm,swiglu").ended_well()
    assert run.losses == pytest.approx(stock(model).losses, rel=1e-5)
    assert len(set(run.losses)) == 4, "the weights change"
    reached = {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}
    assert reached >= features | {"rms-norm", "swiglu"}
    assert run.report["problems"] == []


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep2-alltoall"])
def test_level_0_prints_the_digits_of_the_platform_alone(checkout, initial, layout):
    model, nproc, flags, features = LAYOUTS[layout]
    flags = [*initial(model), *flags, "--train-iters", "3"]
    alone = checkout.stock(nproc, *flags).ended_well()
    level = checkout.adapted(nproc, *flags, "--optimization-level", "0").ended_well()
    assert level.steps == alone.steps
    assert len(level.steps) == 3
    assert {one["name"] for one in level.report["features"]} >= features


@pytest.mark.long
def test_bf16_and_evaluation_go_as_in_a_stock_process(checkout, initial):
    flags = [*initial("llama"), *split("--train-iters 3 --bf16 --eval-iters 2 --eval-interval 2")]
    alone = checkout.stock(1, *flags).ended_well()
    run = checkout.adapted(2, *flags, *DP, "--features", "rms-norm,swiglu").ended_well()
    assert run.losses == pytest.approx(alone.losses, rel=1e-2)
    assert evaluated(run) == pytest.approx(evaluated(alone), rel=1e-2)
    assert len(evaluated(run)) == 3, "after step 2, at the end, and on the test set"
    assert run.report["problems"] == []


def evaluated(run):
    """The losses of all evaluations, as printed."""
    return [float(loss) for loss in re.findall(r"validation loss at iteration .* lm loss value: (\S+) ", run.log)]
