"""Megatron-LM's own script with the old flags of expert models, on two ranks, against one stock process."""

from __future__ import annotations

from shlex import split

import pytest

from tests.megatron_lm.checkout import SHARED

pytestmark = pytest.mark.long

EXPERTS = "--expert-model-parallel-size 2 --moe-grouped-gemm"
ALLTOALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall --moe-permutation-async-comm"
TENSORS = "--tensor-model-parallel-size 2 --sequence-parallel"
FLAGS = {
    "moe-grouped-gemm": EXPERTS,
    "moe-alltoall-dispatcher": ALLTOALL,
    "moe-allgather-dispatcher": f"{EXPERTS} --moe-token-dispatcher-type allgather --moe-permutation-async-comm",
    "moe-alltoall-overlap": f"{ALLTOALL} --moe-alltoall-overlap-comm",
    "moe-allgather-overlap": (
        f"{EXPERTS} --moe-token-dispatcher-type allgather --moe-permutation-async-comm --moe-allgather-overlap-comm"
    ),
    "moe-zero-memory": f"{ALLTOALL} --moe-alltoall-overlap-comm --moe-zero-memory level1 --moe-zero-memory-num-layers 2",
    "moe-adaptive-recompute": f"{EXPERTS} --moe-token-dispatcher-type alltoall --moe-adaptive-recompute-activation",
    "moe-tp-extend-ep": (
        f"{TENSORS} --expert-model-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall_seq "
        "--moe-permutation-async-comm --moe-tp-extend-ep"
    ),
}


@pytest.mark.parametrize("feature", FLAGS)
def test_an_old_flag_trains_as_stock(checkout, initial, stock, feature):
    run = checkout.adapted(2, *initial("moe"), "--train-iters", "4", *split(FLAGS[feature])).ended_well()
    assert feature in {row["name"] for row in run.report["features"]}
    assert run.losses == pytest.approx(stock("moe").losses, rel=1e-5)
    assert run.report["problems"] == []


@pytest.mark.parametrize("overlap", ["", "--moe-alltoall-overlap-comm"], ids=["alone", "hiding transfers"])
def test_the_old_flags_of_shared_experts_train_as_stock(checkout, initial, stock, overlap):
    given = initial("shared")
    start = given.index(SHARED[0])
    flags = [*given[:start], *given[start + len(SHARED) :], "--train-iters", "4"]
    old = f"{ALLTOALL} --n-shared-experts 1 --shared-expert-gate {overlap}"
    run = checkout.adapted(2, *flags, *split(old)).ended_well()
    assert "moe-shared-experts" in {row["name"] for row in run.report["features"]}
    assert run.losses == pytest.approx(stock("shared").losses, rel=1e-5)
    assert run.report["problems"] == []
