"""Agreement of ranks: all ranks of a job have one plan, or none continues. Uses a key-value store, without a collective.

Each rank writes the digest of its content under its number. Rank 0 reads all of them, and writes one verdict for which
the others wait; only where digests differ are the contents read. A rank that fails before writes the verdict itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from mindspeed.engine.planning.fingerprint import Content, describe, describe_value, diff, digest_of, kind_of
from mindspeed.engine.runtime.meeting import AGREED, MOVED, VERDICT, MovedError
from mindspeed.engine.runtime.presence import do_without
from mindspeed.problems import Fix, Problem, RunError, advice
from mindspeed.process.run import SHOWN, name_ranks

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TIMEOUT: Final = "MINDSPEED_AGREEMENT_TIMEOUT"
"""Environment variable: seconds that the ranks wait for the slowest of them; 600 unless it is set."""
SLACK: Final = 30.0
"""Seconds that the others wait longer than rank 0, which knows who is missing."""
TOLD: Final = 10.0
"""Seconds that rank 0 keeps the store open for the others after a verdict that ends the job."""
REPORTED: Final = 10.0
"""Seconds after which rank 0 prints for which ranks it is waiting."""

_FAILED: Final = "failed"


def agree(store: Store, rank: int, size: int, content: Content) -> None:
    """Return when all ``size`` ranks have written equal content.

    Raises RunError: MS610 when contents differ, MS611 when a rank does not come in time, MS612 when one has failed.
    All ranks raise the same. Raises MovedError where the ranks meet elsewhere.
    """
    seconds = patience()
    digest = digest_of(content)
    if not store.check([f"content/{digest}"]):
        store.set(f"content/{digest}", json.dumps(dict(content)))
    store.set(f"rank/{rank}", f"{digest} {socket.gethostname()}")
    if rank == 0:
        problem = _gather(store, size, seconds)
        if problem is not None:
            store.compare_set(VERDICT, "", json.dumps(problem.to_json()))
            verdict = _read(store, VERDICT)
            wait_until_told(store, size, TOLD)
            raise RunError([verdict or problem])
        store.compare_set(VERDICT, "", AGREED)
    else:
        _wait_for_verdict(store, size, seconds + SLACK)
    verdict = _read(store, VERDICT)
    if verdict is not None:
        acknowledge(store)
        raise RunError([verdict])


def publish_failure(store: Store, problem: Problem, size: int, serving: bool) -> None:
    """Tell the other ranks why this one ends; ``serving``: the store ends with this process, so stay until they know."""
    text = json.dumps(problem.to_json())
    store.compare_set(VERDICT, "", text)
    store.compare_set(_FAILED, "", text)
    do_without(store)
    if serving:
        wait_until_told(store, size, SLACK)
    else:
        acknowledge(store)


def failure(store: Store) -> Problem | None:
    """Return the failure that another rank has published, or None. Does not wait."""
    return _read(store, _FAILED) if store.check([_FAILED]) else None


def reporter(store: Store, rank: int, text: str) -> int:
    """Return the rank that prints a text for all ranks: the first that asks."""
    key = f"printed/{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:16]}"
    return int(store.compare_set(key, "", str(rank)))


def acknowledge(store: Store) -> None:
    """Count this rank, or one that was lost, among those that know of a failure."""
    store.add("reported", 1)


def failed_rank(rank: int, error: BaseException) -> Problem:
    """MS612 of a rank that ends with ``error``, as the other ranks show it."""
    problems = getattr(error, "problems", ())
    lines = str(error).splitlines() or [""]
    first = lines[0] if problems else f"{type(error).__name__}: {lines[0]}"
    text = f"rank {rank} failed during the setup of the job: {first}"
    chain = (*(line.strip() for line in lines[1:SHOWN]), f"rank {rank} runs on {socket.gethostname()}")
    return Problem("MS612", text, chain=chain, fix=Fix.advise(f"check the log of rank {rank}"))


def lost_rank(rank: int) -> Problem:
    """MS612 of a rank whose process ended without a word, as the other ranks show it."""
    text = f"rank {rank} ended during the setup of the job without an error message"
    fix = f"check the log of rank {rank}; after a SIGKILL, see the kernel log of the node"
    return Problem("MS612", text, fix=Fix.advise(fix))


def compare(contents: Mapping[str, Content], ranks: Mapping[str, Sequence[int]], hosts: Mapping[int, str]) -> Problem:
    """Name the ranks whose content is not the usual one, and the differences, as MS610.

    ``ranks`` maps the digest of a content to the ranks that have it. The content that most ranks have counts as the right
    one; of equally many, that of the lowest rank.
    """
    usual, *others = sorted(ranks, key=lambda digest: (-len(ranks[digest]), min(ranks[digest])))
    groups = [_differences(contents, ranks, digest, usual) for digest in others]
    first, *heads = (group[0] for group in groups)
    rest = [*heads, *(line for group in groups for line in group[1:])]
    odd = sorted(rank for digest in others for rank in ranks[digest])
    chain = (*rest[: 2 * SHOWN], *(f"rank {rank} runs on {hosts[rank]}" for rank in odd[:SHOWN]))
    fix = advice("give all ranks the same job file, packages and environment")
    if any(kind_of(key) == "operator" for digest in others for key in diff(contents[digest], contents[usual])):
        fix += advice("where measured times of operators differ, run mindspeed ops build on every machine or name the features")
    return Problem("MS610", f"the ranks have different plans: {first}", chain=chain, fix=fix)


def _differences(contents: Mapping[str, Content], ranks: Mapping[str, Sequence[int]], digest: str, usual: str) -> list[str]:
    """Sentences on how the content of some ranks differs from the usual one."""
    keys = diff(contents[digest], contents[usual])
    subject = f"{name_ranks(ranks[digest])} {_have(ranks[digest])}"
    others = "the others" if len(ranks[usual]) > 1 else name_ranks(ranks[usual])
    lines = []
    for key in keys[:SHOWN]:
        value, expected = contents[digest].get(key), contents[usual].get(key)
        if value is None:
            lines.append(f"{subject} {describe(key, None)}, {others} {_have(ranks[usual])} {describe(key, expected)}")
        else:
            lines.append(f"{subject} {describe(key, value)}, {others} {describe_value(key, expected)}")
    return lines if len(keys) <= SHOWN else [*lines, f"and {len(keys) - SHOWN} more differences"]


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _gather(store: Store, size: int, seconds: float) -> Problem | None:
    """Wait for all ranks and compare them; None when they agree or when another rank has given the verdict."""
    keys = [f"rank/{rank}" for rank in range(size)]
    begin, pause, is_reported = time.monotonic(), 0.005, False
    while not store.check(keys):
        if store.check([VERDICT]):
            return _read(store, VERDICT)
        waited = time.monotonic() - begin
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])] if waited > min(REPORTED, seconds) else []
        if waited > seconds:
            return missing(absent, size, seconds)
        if absent and not is_reported:
            is_reported = True
            text = f"waiting for {name_ranks(absent)} of {size} to activate a plan, for at most {seconds:.0f} s"
            print(f"mindspeed: {text}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    ranks: dict[str, list[int]] = {}
    hosts = {}
    for rank, key in enumerate(keys):
        digest, _, hosts[rank] = store.get(key).decode().partition(" ")
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) == 1:
        return None
    contents = {digest: json.loads(store.get(f"content/{digest}")) for digest in ranks}
    return compare(contents, ranks, hosts)


def _wait_for_verdict(store: Store, size: int, seconds: float) -> None:
    try:
        store.wait([VERDICT], timedelta(seconds=seconds))
    except RuntimeError as error:
        absent = [rank for rank in range(size) if not store.check([f"rank/{rank}"])]
        raise RunError([missing(absent or [0], size, seconds)]) from error


def wait_until_told(store: Store, size: int, seconds: float) -> None:
    """Keep the store open until all other ranks know of a failure, or this long."""
    end = time.monotonic() + seconds
    while store.add("reported", 0) < size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def missing(ranks: Sequence[int], size: int, seconds: float) -> Problem:
    """MS611 of ranks that did not come in time."""
    text = f"{name_ranks(ranks)} of {size} did not activate a plan within {seconds:.0f} s"
    fix = f"check the log of {name_ranks(ranks)}; set {TIMEOUT}=SECONDS to wait longer"
    return Problem("MS611", text, fix=(*advice(fix), *advice(_own_store(os.environ))))


def _own_store(environment: Mapping[str, str]) -> str:
    """Return the advice for a restart whose agents keep a store each, else '': after a node was replaced ranks may read two."""
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not shares or environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return ""
    return "after the node of rank 0 was replaced, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"


def replaced() -> Problem:
    """MS611 of a rank 0 whose job has been started again while it waited."""
    text = "the job was started again, and this rank 0 belongs to the start before"
    return Problem("MS611", text, fix=Fix.advise("end the processes of the earlier start"))


def _read(store: Store, key: str) -> Problem | None:
    text = store.get(key).decode()
    if text == AGREED:
        return None
    if text == MOVED:
        raise MovedError
    return Problem.from_json(json.loads(text))


def unreachable(host: str, port: int, reason: str) -> Problem:
    """MS611 of a rank that finds no store."""
    first = reason.splitlines()[0] if reason else ""
    fix = "check the log of rank 0, and whether this node can reach rank 0"
    return Problem("MS611", f"the rendezvous store of this job at {host}:{port} is not reachable: {first}", fix=advice(fix))


def patience() -> float:
    """Seconds that the ranks wait for the slowest of them."""
    try:
        return float(os.environ.get(TIMEOUT, ""))
    except ValueError:
        return 600.0
