import pytest

from mindspeed import registry
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.gloo_free_checkpoint.jobs import FAULTS, exchange

LENGTH = 5


def check(pool: WorkerPool, ranks: int, size: int, padding: int, fault: str = "", poison: bool = False) -> None:
    whole = ranks * LENGTH - padding
    settings = {"device-emulation": {"poison": poison}}
    plan = registry.plan(platform="cpu", level=0, settings=settings, world={"world_size": ranks})
    results = pool.call(exchange, ranks, LENGTH, whole, size, fault, plan=plan)
    numbers = [float(number + 1) for number in range(whole)]
    assert results[0][0] == numbers
    returned = [number for _, shard, _ in results for number in shard]
    assert returned == numbers + [0.0] * padding
    if poison:  # which has buffers of its own
        return
    slice_bytes = min(size, LENGTH) * 4
    assert results[0][2] <= (ranks + 1) * slice_bytes
    assert all(peak <= 2 * slice_bytes for _, _, peak in results[1:])


def test_slices_bring_every_shard_to_the_first_rank_and_back(pool: WorkerPool) -> None:
    check(pool, 2, 2, 3)


@pytest.mark.long
@pytest.mark.parametrize("padding", [0, 1, 7])
@pytest.mark.parametrize("size", [1, 3, LENGTH, 100])
def test_slices_of_any_size_and_padding_over_several_shards(pool: WorkerPool, size: int, padding: int) -> None:
    check(pool, 4, size, padding)


@pytest.mark.long
def test_poison_finds_no_early_use_of_a_slice(pool: WorkerPool) -> None:
    check(pool, 4, 3, 1, poison=True)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_exchange_is_found(pool: WorkerPool, fault: str) -> None:
    with pytest.raises(AssertionError):
        check(pool, 4, 3, 1, fault, poison=True)
