"""Checking and timing one piece of work on a GPU.

Times are between two events on the stream. Before each, a buffer larger than the cache is overwritten, and the stream sleeps
while the host enqueues, so neither warm caches nor the host count. Candidates take turns; a copy between two buffers is the
control and the ceiling: when it runs more than 5 % slower or faster in the second half of the turns, the race is run again,
and after three the row says so and counts as missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

DRIFT: Final = 0.05
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Relative to the largest value of a result."""
_CONTROL: Final = 1 << 28
"""Elements of bf16 that the control copies: half a gigabyte."""
_SLEEP: Final = 2_000_000
"""Clock cycles that the stream sleeps: about a millisecond, longer than any candidate takes to enqueue."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """One thing that is measured.

    ``ours`` and ``formula`` give the same tensors, the latter in plain torch. ``moved`` are bytes that it cannot but read and
    write, for a row against the copy with the target ``share``; ``flops`` are what the note says the rate of.
    ``targets``: our speed as a multiple of a peer's; of peers without one, the best has to be reached.
    """

    ours: Call
    formula: Call
    peers: Mapping[str, Call]
    dtype: torch.dtype
    moved: float = 0.0
    share: float = 0.0
    flops: float = 0.0
    targets: Mapping[str, float] = field(default_factory=dict)
    tolerance: float | None = None


@dataclass(frozen=True)
class Race:
    """Median seconds of ours and of each peer, bytes per second of the copy, and how far the copy drifted."""

    seconds: Mapping[str, float]
    copy_rate: float
    drift: float


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]


def mismatch(work: Work) -> str:
    """What differs between ours and the formula by more than the tolerance; nothing if all is well."""
    tolerance = TOLERANCE[work.dtype] if work.tolerance is None else work.tolerance
    found, expected = tensors_of(work.ours()), tensors_of(work.formula())
    if [t.shape for t in found] != [t.shape for t in expected]:
        return f"shapes {[tuple(t.shape) for t in found]} instead of {[tuple(t.shape) for t in expected]}"
    for number, (value, reference) in enumerate(zip(found, expected, strict=True)):
        scale = max(float(reference.abs().max()), 1e-30) if reference.numel() else 1.0
        largest = float((value.float() - reference.float()).abs().max()) / scale if value.numel() else 0.0
        if not largest <= tolerance:
            return f"result {number} is off by {largest:.2g} of its largest value; {tolerance:.2g} is allowed"
    return ""


def race(work: Work, turns: int = 12) -> Race:
    """Time ours and its peers; a peer that fails is left out."""
    runnable = {"ours": work.ours} | {name: call for name, call in work.peers.items() if _runs(call)}
    for _ in range(3):
        result = _once(runnable, turns)
        if result.drift <= DRIFT:
            break
    return result


def _runs(call: Call) -> bool:
    try:
        call()
        torch.cuda.synchronize()
    except Exception:  # whatever a foreign kernel or compiler raises: the note of the row names the peer
        return False
    return True


def _once(candidates: Mapping[str, Call], turns: int) -> Race:
    source = torch.randn(_CONTROL, device="cuda", dtype=torch.bfloat16)
    target, flush = torch.empty_like(source), torch.empty(1 << 26, device="cuda", dtype=torch.int32)
    everyone: dict[str, Call] = {**candidates, "control": lambda: target.copy_(source)}
    samples: dict[str, list[float]] = {name: [] for name in everyone}
    for call in everyone.values():
        call()
        call()
    for _ in range(turns):
        for name, call in everyone.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda._sleep(_SLEEP)
            begin.record()
            result = call()
            end.record()
            torch.cuda.synchronize()
            del result
            samples[name].append(begin.elapsed_time(end) / 1e3)
    control = samples.pop("control")
    halves = statistics.median(control[: turns // 2]), statistics.median(control[turns // 2 :])
    rate = 2 * source.numel() * source.element_size() / statistics.median(control)
    seconds = {name: statistics.median(spent) for name, spent in samples.items()}
    return Race(seconds, rate, abs(halves[1] / halves[0] - 1))
