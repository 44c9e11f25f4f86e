"""Traces of a run in one process: how often each feature did something, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed.runtime.session import Session
from mindspeed.verification.record import RankResult


@contextmanager
def evidence(session: Session, record: RankResult) -> Iterator[None]:
    """Write into ``record`` what the features did in the block. The session's own proof counts, and says nothing itself."""
    session.proof.say = None
    yield
    record.reached = session.proof.effects()
