"""The states of ranks in a hang, and the ranks that lag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed.problems import Fix, Problem
from mindspeed.process.run import name_ranks


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that a rank writes with its heartbeat; ``pending`` is True where it waits for ``collective``.

    ``idle`` are the seconds since its training loop entered or left a section. ``site`` is the line that the loop runs.
    """

    step: int
    section: str
    idle: float
    host: str
    process: int
    machine: str = ""
    collective: str = ""
    pending: bool = False
    site: str = ""
    responds: bool = True

    def text(self) -> str:
        """Describe the rank without its number, so that equal ranks have equal texts."""
        if not self.responds:
            text = f"does not respond (process {self.process} on {self.host})"
            return f"{text}; its last heartbeat was in step {self.step}, {self.section}"
        text = f"step {self.step}, {self.section}, at {self.site or 'an unknown line'}"
        if not self.collective:
            return f"{text}; torch has recorded no collective"
        return f"{text}; {'waits in' if self.pending else 'its last collective is'} {self.collective}"


def problem_of(states: Mapping[int, RankState], size: int, log: str) -> Problem:
    """Return MS620 for a hang, from the states of ranks; ranks without one have never written a heartbeat."""
    silent = [rank for rank in range(size) if rank not in states or not states[rank].responds]
    working = [rank for rank, state in states.items() if state.responds and not state.pending]
    waits = {state.collective for state in states.values() if state.pending}
    if silent:
        text = f"{name_ranks(silent)} hung: no heartbeat while the other ranks wait"
    elif working and waits:
        text = f"{name_ranks(working)} hung in {_sections(states, working)} while the other ranks wait in a collective"
    elif len(waits) > 1:
        text = "the ranks hung: they wait in different collectives"
    elif waits:
        text = "all ranks hung in the same collective: a device or the network does not move its data"
    else:
        text = f"{name_ranks(working)} hung in {_sections(states, working)}"
    return _problem(text, states, log)


def without_store(state: RankState, rank: int, log: str) -> Problem:
    """Return MS620 for a hang of which this rank does not know the states of others."""
    text = "a rank hung, and so does the process that keeps the heartbeats of all ranks"
    return _problem(text, {rank: state}, log)


def _problem(text: str, states: Mapping[int, RankState], log: str) -> Problem:
    alike: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        alike.setdefault(state.text(), []).append(rank)
    chain = tuple(f"{name_ranks(ranks)}: {same}" for same, ranks in alike.items())
    fix = Fix.advise("read the stacks in the logs of these ranks; for a rank that does not respond, see the log of its node")
    return Problem("MS620", text, ("resiliency",), chain=chain, where=log, fix=fix)


def _sections(states: Mapping[int, RankState], ranks: list[int]) -> str:
    return ", ".join(sorted({_place(states[rank]) for rank in ranks}))


def _place(state: RankState) -> str:
    return f"step {state.step}" if state.section == "step" else f"{state.section} of step {state.step}"
