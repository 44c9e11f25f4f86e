"""Each rank hears of another one whose process ends, and of none that leaves in an orderly way."""

import socket
import time

import pytest
from torch.distributed import HashStore

from mindspeed.engine.runtime import presence
from mindspeed.engine.runtime.presence import Presence


@pytest.fixture
def ranks():
    """Three ranks, joined."""
    store = HashStore()
    made = [Presence(rank, 3, "127.0.0.1") for rank in range(3)]
    for rank in made:
        rank.join(store, 1)
    made[0].look(0.1), made[0].look(0.1)
    yield made
    for rank in made:
        rank.leave()


def ended(ranks, rank):
    """End a process: the kernel closes its connections."""
    for peer in tuple(ranks[rank]._peers):
        ranks[rank]._selector.unregister(peer)
        peer.close()
    ranks[rank]._peers.clear()


def heard(ranks, rank, seconds=2.0):
    end = time.monotonic() + seconds
    while not ranks[rank].lost and time.monotonic() < end:
        ranks[rank].look(0.05)
    return ranks[rank].lost


@pytest.mark.parametrize("lost", [1, 2])
def test_rank_0_hears_of_a_rank_that_ends_and_tells_the_others(ranks, lost):
    ended(ranks, lost)
    assert (heard(ranks, 0), heard(ranks, 3 - lost)) == ([lost], [lost])


def test_the_others_hear_of_rank_0(ranks):
    ended(ranks, 0)
    assert (heard(ranks, 1), heard(ranks, 2)) == ([0], [0])


def test_a_rank_that_leaves_is_not_lost(ranks):
    ranks[1]._send(b"left")
    ended(ranks, 1)
    assert heard(ranks, 0, 0.2) == []


def test_a_stranger_is_no_rank(ranks):
    stranger = socket.create_connection(ranks[0]._server.getsockname())
    stranger.sendall(b"0000 1\n")
    stranger.close()
    assert heard(ranks, 0, 0.2) == []


def test_a_look_ends_when_it_is_woken(ranks):
    ranks[1].wake()
    begin = time.monotonic()
    assert ranks[1].look(60) == []
    assert time.monotonic() - begin < 5


def test_a_job_that_needs_more_descriptors_than_there_are_goes_without(monkeypatch):
    monkeypatch.setattr(presence.resource, "getrlimit", lambda kind: (1024, 1024))
    store = HashStore()
    first = Presence(0, 1024, "127.0.0.1")
    first.join(store, 1)
    assert store.get("presence") == b"-"
    second = Presence(1, 1024, "127.0.0.1")
    second.join(store, 1)
    assert (first._server, second._peers) == (None, {})
    first.leave(), second.leave()


def test_a_rank_that_waits_for_rank_0_hears_of_a_failure(monkeypatch):
    store = HashStore()
    presence.do_without(store)
    waiting = Presence(1, 2, "127.0.0.1")
    waiting.join(store, 60)
    waiting.leave()


def test_a_rank_waits_no_longer_than_it_is_told():
    waiting = Presence(1, 2, "127.0.0.1")
    with pytest.raises(RuntimeError, match="timeout"):
        waiting.join(HashStore(), 0.05)
    waiting.leave()
