"""The garbage collector, out of the way of work that leaves nothing to collect."""

import gc

import pytest

from mindspeed.process import gc_pause
from mindspeed.process.gc_pause import collector_paused


def test_what_is_made_meanwhile_is_not_walked_when_the_collector_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "_froze", False)
    gc.collect()
    seen = list[str]()

    def watch(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(watch)
    try:
        with collector_paused():
            made = [[] for _ in range(10 * gc.get_threshold()[0])]
        more = [[]]
    finally:
        gc.callbacks.remove(watch)
    assert (seen, len(made), len(more), gc.isenabled()) == ([], 10 * gc.get_threshold()[0], 1, True)


def test_objects_that_the_program_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with collector_paused():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
