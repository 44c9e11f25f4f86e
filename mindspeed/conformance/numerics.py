"""Check the numerics claim by the proof of ``mindspeed features verify``, feature by feature."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.conformance.outcome import Outcome, judged
from mindspeed.conformance.subjects import Subject
from mindspeed.diagnostics import doctor
from mindspeed.plugins.problems import MindSpeedError
from mindspeed.verification.case import build_case
from mindspeed.verification.harness import verify
from mindspeed.verification.pool import WorkerPool


def parity(subjects: Sequence[Subject], pool: WorkerPool | None = None) -> list[Outcome]:
    """Train a tiny model with and without each feature and compare. Starts worker processes unless given a pool."""
    missing = doctor.problems()
    if missing:
        return [Outcome(s.name, "parity", "not run", ", ".join(p.message for p in missing)) for s in subjects]
    if pool is not None:
        return [_parity(subject, pool) for subject in subjects]
    with WorkerPool() as own:
        return [_parity(subject, own) for subject in subjects]


def _parity(subject: Subject, pool: WorkerPool) -> Outcome:
    try:
        verdict = verify(build_case([subject.name]), pool)
    except MindSpeedError as error:
        lines = str(error).splitlines()
        return Outcome(subject.name, "parity", "failed", lines[0], tuple(lines[1:]))
    wrong = [problem.message for problem in verdict.problems]
    return judged(subject.name, "parity", wrong, f"on against off: {verdict.claim} holds in {len(verdict.checks)} comparisons")
