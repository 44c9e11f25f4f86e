"""How much of its share of the time does a rank lose? Causal attention over ranks of gloo against one process.

``python -m benchmarks.context_parallel``. There are more ranks than cores, so ranks take turns: one computes at a time, and
at each wait gives the core away. The time of an algorithm is the sum, over the stretches between waits, of the slowest rank's:
what ranks with a core each would take over a transport that costs nothing. Wall times, all ranks at once, are in the notes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.sequences.ranks import NAIVE_RING, ONE, SHARE, measured
from benchmarks.sequences.turns import Sample
from benchmarks.table import Row, main
from mindspeed.workbench.verification.pool import WorkerPool

COMMAND: Final = "python -m benchmarks.context_parallel"
RANKS: Final = (2, 4)
IDEAL: Final = 0.95
"""Of the ideal speed, one process divided by ranks, that an algorithm has to reach."""
NAIVE: Final = {2: 0.72, 4: 0.62}
"""Of the naive ring's time that the balanced ring may take; by the number of pairs it is 2/3 and 4/7."""

Ranks = Sequence[Mapping[str, Sequence[Sample]]]


def rows() -> list[Row]:
    root = Path(__file__).resolve().parents[1]
    made: list[Row] = []
    with WorkerPool(search_path=[str(root)]) as pool, tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            made += rows_of(ranks, pool.call(measured, ranks, str(Path(folder) / "token")))
    return made


def rows_of(ranks: int, samples: Ranks) -> list[Row]:
    """Rows of one number of ranks from what each of them measured."""
    seconds = {name: _critical([of[name] for of in samples if of[name]]) for name in samples[0]}
    walls = {name: min(max(run.wall for run in runs) for runs in _by_turn(name, samples)) for name in samples[0]}
    alone, naive, made = seconds.pop(ONE), seconds.pop(NAIVE_RING), []
    base = f"causal attention, {ranks} ranks of {SHARE} tokens, forward + backward"
    for name, spent in sorted(seconds.items()):
        note = f"{spent * 1e3:.0f} ms, one process {alone * 1e3:.0f} ms; wall {walls[name] * 1e3:.0f} ms"
        made.append(Row(f"{base}: one process / ranks / {name}", IDEAL, alone / ranks / spent, "x", COMMAND, note, least=True))
    note = f"the naive ring {naive * 1e3:.0f} ms, wall {walls[NAIVE_RING] * 1e3:.0f} ms"
    return [*made, Row(f"{base}: ring / naive ring", NAIVE[ranks], seconds["ring"] / naive, "x", COMMAND, note)]


def _by_turn(name: str, samples: Ranks) -> list[tuple[Sample, ...]]:
    """The samples of every rank that made some, turn by turn."""
    return list(zip(*(of[name] for of in samples if of[name]), strict=True))


def _critical(ranks: Sequence[Sequence[Sample]]) -> float:
    """Seconds of the slowest rank between waits, summed; of the turns the fastest, for other load only ever adds."""
    fastest = [[min(spent) for spent in zip(*(run.segments for run in runs), strict=True)] for runs in ranks]
    return sum(max(of_ranks) for of_ranks in zip(*fastest, strict=True))


if __name__ == "__main__":
    main(rows)
