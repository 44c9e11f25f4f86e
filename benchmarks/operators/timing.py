"""Ratios of times that a busy machine cannot bend: candidates in turns, medians of ratios within a turn, a control.

The control is a copy between two buffers, timed in every turn. When it runs more than 5 % slower or faster in the
second half than in the first the race is run again, and after three races its ratios are given with that remark.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.table import Row

COMMAND: Final = "python -m benchmarks.ops"
DRIFT: Final = 0.05
SAMPLE: Final = 4e-3
"""Seconds that one sample lasts at least: short calls are repeated."""


@dataclass(frozen=True)
class Race:
    """What a race gave: ``ratios[name]`` is the peer's time over ours; ``seconds`` are medians, of ours under ``"ours"``."""

    seconds: Mapping[str, float]
    ratios: Mapping[str, float]
    copy_rate: float
    """Bytes per second, read and written, of the control."""
    drift: float

    @property
    def best(self) -> str:
        """The fastest peer."""
        return min(self.ratios, key=lambda name: self.ratios[name])

    def remark(self) -> str:
        """A sentence when the machine was not steady, else nothing."""
        return f"the control drifted by {self.drift:.0%} in each of three runs" if self.drift > DRIFT else ""


def race(ours: Callable[[], object], peers: Mapping[str, Callable[[], object]], turns: int = 15) -> Race:
    """Time ``ours`` against each peer; every callable is called twice before."""
    for _ in range(3):
        result = _once({"ours": ours, **peers}, turns)
        if result.drift <= DRIFT:
            break
    return result


def rows(what: str, result: Race, targets: Mapping[str, float], note: str = "") -> list[Row]:
    """A row per peer with a target, and one that says that no peer is faster."""
    remarks = "; ".join(text for text in (note, result.remark()) if text)
    made = [
        Row(f"{what}: {peer} / ours", target, result.ratios[peer], "x", COMMAND, remarks, least=True)
        for peer, target in targets.items()
    ]
    best = result.best
    if best not in targets:
        made.append(Row(f"{what}: best peer ({best}) / ours", 1.0, result.ratios[best], "x", COMMAND, remarks, least=True))
    return made


def forward_backward(run: Callable[..., Any], *inputs: Any, wanted: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """A callable that runs ``run(*inputs)`` and its gradients with respect to ``wanted``, from a fixed random gradient."""
    given = torch.randn_like(run(*inputs))
    return lambda: torch.autograd.grad(run(*inputs), wanted, given)


def _once(candidates: Mapping[str, Callable[[], object]], turns: int) -> Race:
    source = torch.randn(1 << 22)
    target = torch.empty_like(source)
    everyone = {**candidates, "control": lambda: target.copy_(source)}
    repeats = {name: _repeats(run) for name, run in everyone.items()}
    samples: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(turns):
        for name, run in everyone.items():
            samples[name].append(_sample(run, repeats[name]))
    seconds = {name: statistics.median(spent) for name, spent in samples.items()}
    ratios = {
        name: statistics.median(peer / own for peer, own in zip(samples[name], samples["ours"], strict=True))
        for name in candidates
        if name != "ours"
    }
    control = samples["control"]
    half = len(control) // 2
    drift = abs(statistics.median(control[:half]) / statistics.median(control[-half:]) - 1)
    return Race(seconds, ratios, 2 * source.numel() * source.element_size() / seconds["control"], drift)


def _repeats(run: Callable[[], object]) -> int:
    run()
    return max(1, round(SAMPLE / max(_sample(run, 1), 1e-9)))


def _sample(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats
