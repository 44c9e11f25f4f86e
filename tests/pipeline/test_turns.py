"""Two computations in turns."""

import threading
from types import SimpleNamespace

import pytest

from mindspeed.process.turns import hand_over, in_turns


class Held:
    """A state of the process."""

    def __init__(self) -> None:
        self.value = 0

    def get(self) -> int:
        return self.value

    def set(self, value: int) -> None:
        self.value = value


def test_each_runs_until_it_hands_over_and_the_second_begins() -> None:
    seen: list[str] = []

    def steps(name: str, count: int) -> str:
        for step in range(count):
            seen.append(f"{name}{step}")
            hand_over()
        return name

    assert in_turns(lambda: steps("a", 2), lambda: steps("b", 4)) == ("a", "b")
    assert seen == ["b0", "a0", "b1", "a1", "b2", "b3"]


def test_each_has_the_states_as_if_it_ran_alone_and_the_first_leaves_them() -> None:
    held = Held()

    def counts(step: int, times: int) -> list[int]:
        found = []
        for _ in range(times):
            held.value += step
            found.append(held.value)
            hand_over()
        return found

    assert in_turns(lambda: counts(1, 3), lambda: counts(10, 2), [held]) == ([1, 2, 3], [10, 20])
    assert held.value == 3
    assert in_turns(lambda: counts(1, 1), lambda: counts(10, 3), [held]) == ([4], [13, 23, 33])
    assert held.value == 4


def test_a_pass_that_hands_over_within_a_random_state_finds_its_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed.pipeline import paired_transfers

    tracker = SimpleNamespace(_current_state_name="default-rng")
    monkeypatch.setattr(paired_transfers, "get_cuda_rng_tracker", lambda: tracker)

    def forked(name: str) -> str:
        before, tracker._current_state_name = tracker._current_state_name, name
        hand_over()
        found, tracker._current_state_name = tracker._current_state_name, before
        return found

    names = in_turns(lambda: forked("model"), lambda: forked("expert"), [paired_transfers.TRACKER_NAME])
    assert names == ("model", "expert")
    assert tracker._current_state_name == "default-rng"


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_raises_ends_the_other_where_it_has_handed_over(failing: int) -> None:
    ended: list[str] = []

    def fails() -> None:
        hand_over()
        raise ValueError("broken")

    def goes_on() -> None:
        try:
            for _ in range(10):
                hand_over()
            ended.append("all")
        finally:
            ended.append("ended")

    first, second = (fails, goes_on) if failing == 0 else (goes_on, fails)
    with pytest.raises(ValueError, match="broken"):
        in_turns(first, second)
    assert ended == ["ended"]
    assert in_turns(lambda: 1, lambda: threading.current_thread().name) == (1, "second-of-a-pair_0")


def test_alone_nothing_is_handed_over_and_turns_do_not_nest() -> None:
    hand_over()
    with pytest.raises(RuntimeError, match="turns already"):
        in_turns(lambda: in_turns(int, int), int)
