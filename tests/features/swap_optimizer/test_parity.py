"""The feature against the same layout without it: bit for bit, over steps of plain Adam, and what is on the device."""

import pytest

from mindspeed.workbench.verification.pool import WorkerPool
from tests.memory.adam_steps import Trained, without_and_with

NAME, REUSE = "swap-optimizer", "reuse-fp32-param"
PARTS = 4


def proven(pool: WorkerPool, nproc: int, *also: str, dtype: str = "bf16", reuse: bool = False, **world: int) -> list[Trained]:
    """Every rank with the feature, which must be equal to the bit to one without it."""
    names = [NAME, REUSE] if reuse else [NAME]
    settings = {name: {"parts": PARTS} for name in names}
    stock, found = without_and_with(pool, names, nproc, also, settings, {"dtype": dtype, **world})
    for reference, rank in zip(stock, found, strict=True):
        assert rank.bytes["state"] == rank.bytes["main"] == rank.bytes["residual"] == 0
        assert rank.bytes["host"] == sum(reference.bytes.values()) - (2 * rank.numbers if reuse else 0)
        assert rank.window <= 3 * (4 * rank.numbers / PARTS + 4 * rank.largest)
    return found


@pytest.mark.long
def test_five_steps_are_bit_equal_and_leave_nothing_on_the_device(pool: WorkerPool) -> None:
    proven(pool, 1)


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_states_of_fp32_weights_are_swapped_alone(pool: WorkerPool, nproc: int) -> None:
    (rank, *_) = proven(pool, nproc, *(["distributed-optimizer"] if nproc > 1 else []), dtype="fp32")
    assert rank.numbers == 0


@pytest.mark.long
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_shards_of_the_distributed_optimizer_are_bit_equal(pool: WorkerPool, nproc: int, reuse: bool) -> None:
    proven(pool, nproc, "distributed-optimizer", reuse=reuse)


@pytest.mark.long
@pytest.mark.parametrize("also", ["async-ddp", "async-param-gather", "pipeline-parallel", "tensor-parallel"])
def test_a_layout_is_bit_equal_together_with_residuals(pool: WorkerPool, also: str) -> None:
    proven(pool, 2, also, reuse=True)


@pytest.mark.long
def test_experts_have_an_optimizer_of_their_own(pool: WorkerPool) -> None:
    proven(pool, 2, "expert-parallel", "distributed-optimizer", reuse=True)


@pytest.mark.long
def test_odd_sizes_are_bit_equal_together_with_residuals(pool: WorkerPool) -> None:
    proven(pool, 2, "distributed-optimizer", reuse=True, hidden_size=36, ffn_hidden_size=51, vocab_size=67)


@pytest.mark.long
@pytest.mark.parametrize("names", [[REUSE], [NAME], [NAME, REUSE]], ids="+".join)
def test_nothing_reads_what_is_away_or_still_on_its_way(pool: WorkerPool, names: list[str]) -> None:
    settings = {**{name: {"parts": PARTS} for name in names}, "device-emulation": {"poison": True}}
    without_and_with(pool, names, 2, ["distributed-optimizer"], settings, {})
