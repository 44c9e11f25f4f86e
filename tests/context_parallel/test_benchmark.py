"""`benchmarks/context_parallel.py`: what its ranks do, and what its rows say of it."""

from pathlib import Path

from benchmarks.context_parallel import rows_of
from benchmarks.sequences.ranks import ONE, measured
from benchmarks.sequences.turns import Sample
from mindspeed.workbench.verification.pool import WorkerPool


def test_ranks_take_turns_between_their_waits_and_are_right(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.call(measured, 2, str(tmp_path / "token"), 8, 2)
    assert list(first) == [ONE, "ring", "naive ring", "Ulysses", "gathering"]
    assert [len(samples) for samples in first.values()] == [1, 2, 2, 1, 1]
    assert second[ONE] == []
    stretches = {name: {len(sample.segments) for rank in (first, second) for sample in rank[name]} for name in first}
    # a ring of two waits for a block, and backward also for its gradient; Ulysses for four tensors each way
    assert stretches == {ONE: {1}, "ring": {4}, "naive ring": {4}, "Ulysses": {9}, "gathering": {4}}
    assert all(seconds > 0 for samples in first.values() for sample in samples for seconds in (*sample.segments, sample.wall))


def test_the_time_of_an_algorithm_is_that_of_the_slowest_rank_between_waits() -> None:
    fast, slow = Sample((1.0, 3.0), 9.0), Sample((2.0, 1.0), 7.0)
    one = {ONE: [Sample((8.0,), 8.0)]}
    first, second = {**one, "ring": [fast, slow], "naive ring": [fast]}, {ONE: [], "ring": [slow, fast], "naive ring": [slow]}
    rows = rows_of(2, [first, second])
    assert [(row.what.rpartition(": ")[2], row.measured, row.met) for row in rows] == [
        ("one process / ranks / ring", 2.0, True),
        ("ring / naive ring", 2 / 5, True),
    ]
    assert [row.note for row in rows] == [
        "2000 ms, one process 8000 ms; wall 9000 ms",
        "the naive ring 5000 ms, wall 9000 ms",
    ]
