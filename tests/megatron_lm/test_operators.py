"""Megatron-LM's own script with operators in its linear layers and experts, against the script on the platform alone."""

from __future__ import annotations

import pytest

ITERATIONS = ("--train-iters", "4")
EXPERTS = ("--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "2")
TENSORS = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def reached(run) -> set[str]:
    return {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "layout"), [(1, ()), (2, TENSORS), (2, ("--overlap-grad-reduce",))], ids=str)
def test_gradients_are_accumulated_by_the_product_without_a_flag_that_forbids_it(checkout, initial, stock, nproc, layout):
    run = checkout.adapted(nproc, *initial("llama"), *ITERATIONS, *layout, "--features", "matmul-add").ended_well()
    assert "matmul-add" in reached(run)
    assert run.losses == pytest.approx(stock("llama").losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "layout"), [(1, ()), (2, EXPERTS), (2, (*EXPERTS, "--moe-token-dispatcher-type", "alltoall"))]
)
def test_tokens_are_permuted_by_operators_without_transformer_engine(checkout, initial, stock, nproc, layout):
    run = checkout.adapted(nproc, *initial("moe"), *ITERATIONS, *layout, "--moe-permute-fusion").ended_well()
    assert "moe-token-permute" in reached(run)
    assert run.losses == pytest.approx(stock("moe").losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "layout"), [(1, ()), (2, EXPERTS)])
def test_grouped_experts_go_on_from_weights_of_single_ones(checkout, initial, stock, nproc, layout):
    flags = ["--moe-grouped-gemm", "--features", "grouped-matmul-add,matmul-add"]
    run = checkout.adapted(nproc, *initial("moe"), *ITERATIONS, *layout, *flags).ended_well()
    assert {"grouped-matmul-add", "matmul-add"} <= reached(run)
    assert run.losses == pytest.approx(stock("moe").losses, rel=1e-5)
