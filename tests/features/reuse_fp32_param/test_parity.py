"""The feature against the same layout without it: bit for bit, over steps of plain Adam, and the bytes that it saves."""

from typing import Any

import pytest

from mindspeed.workbench.verification.pool import WorkerPool
from tests.memory.adam_steps import Trained, without_and_with

NAME = "reuse-fp32-param"
PARTS = 4


def proven(pool: WorkerPool, nproc: int, also: tuple[str, ...] = (), **world: Any) -> tuple[list[Trained], list[Trained]]:
    """Every rank without and with the feature, which must be equal to the bit."""
    stock, found = without_and_with(pool, [NAME], nproc, also, {NAME: {"parts": PARTS}}, world)
    for rank in found:
        numbers = rank.numbers
        assert rank.bytes["main"] == 0
        assert rank.bytes["residual"] == 2 * numbers
        assert rank.bytes["ties"] <= 16 + numbers * 2**-13  # of few weights one or two may be ties by chance
        assert rank.window <= 4 * numbers / PARTS + 4 * rank.largest
    assert [rank.bytes["main"] for rank in stock] == [4 * rank.numbers for rank in found]
    return stock, found


@pytest.mark.long
def test_five_steps_are_bit_equal_and_keep_two_bytes_of_a_main_weight(pool: WorkerPool) -> None:
    proven(pool, 1)


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_shards_of_the_distributed_optimizer_are_bit_equal(pool: WorkerPool, nproc: int) -> None:
    _, found = proven(pool, nproc, ("distributed-optimizer",))
    assert sum(rank.numbers for rank in found) < 1.1 * proven(pool, 1)[1][0].numbers  # each number on one rank


@pytest.mark.long
@pytest.mark.parametrize("also", ["async-ddp", "async-param-gather", "pipeline-parallel", "tensor-parallel"])
def test_a_layout_is_bit_equal(pool: WorkerPool, also: str) -> None:
    proven(pool, 2, (also,))


@pytest.mark.long
def test_odd_sizes_are_bit_equal(pool: WorkerPool) -> None:
    proven(pool, 2, ("distributed-optimizer",), hidden_size=36, ffn_hidden_size=51, vocab_size=67)
