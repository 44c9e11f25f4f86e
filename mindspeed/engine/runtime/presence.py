"""Detect ranks whose process ends, however it ends: each rank keeps a connection to rank 0, which the kernel closes."""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_KEY: Final = "presence"
_NONE: Final = "-"
_LEFT: Final = b"left"
"""Line of a rank that ends in an orderly way."""
_CONNECT: Final = 5.0
"""Seconds for a connection to rank 0."""


def do_without(store: Store) -> None:
    """Have ranks that wait for rank 0 wait no longer, unless it listens."""
    store.compare_set(_KEY, "", _NONE)


class Presence:
    """The connections of one rank; ``lost`` holds the ranks whose process has ended without `leave`.

    Rank 0 accepts a connection of each rank and reports lost ranks to all others. After `join` one thread calls `look`.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self._host = rank, size, host
        self.lost: list[int] = []
        self._process = os.getpid()
        self._secret = ""
        self._server: socket.socket | None = None
        self._peers: dict[socket.socket, tuple[int | None, bytes]] = {}  # the rank, once it is known, and text without its end
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def join(self, store: Store, seconds: float) -> None:
        """Listen as rank 0, or wait for rank 0 and connect to it. A rank that cannot connect has no presence.

        Raises RuntimeError where rank 0 does not come in ``seconds``.
        """
        if self.rank == 0:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if limit == resource.RLIM_INFINITY or limit > 4 * self.size:
                self._listen(store)
            do_without(store)
            return
        store.wait([_KEY], timedelta(seconds=seconds))
        port, _, self._secret = store.get(_KEY).decode().partition(" ")
        if port != _NONE:
            with suppress(OSError):
                peer = socket.create_connection((self._host, int(port)), _CONNECT)
                peer.sendall(f"{self._secret} {self.rank}\n".encode())
                self._add(peer, 0)

    def look(self, seconds: float | None) -> list[int]:
        """Wait at most this long, or until `wake`, for ranks that end. Returns the ranks that were lost."""
        before = len(self.lost)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                self._woken.recv(64)
            elif key.fileobj is self._server:
                with suppress(OSError):
                    self._add(self._server.accept()[0], None)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]
        return self.lost[before:]

    def wake(self) -> None:
        """End a `look` of another thread."""
        self._wake.send(b"w")

    def leave(self) -> None:
        """Close the connections of a rank that ends in an orderly way; in a fork of the process, only its copies."""
        if os.getpid() == self._process:
            self._send(_LEFT)
        for opened in (*self._peers, self._wake, self._woken, *([self._server] if self._server else [])):
            opened.close()
        self._peers.clear()
        self._selector.close()

    def _listen(self, store: Store) -> None:
        self._secret = secrets.token_hex(16)
        try:
            self._server = socket.create_server((self._host, 0), backlog=self.size)
        except OSError:  # an address that other nodes alone know
            self._server = socket.create_server(("", 0), backlog=self.size)
        self._selector.register(self._server, selectors.EVENT_READ)
        store.set(_KEY, f"{self._server.getsockname()[1]} {self._secret}")

    def _add(self, peer: socket.socket, rank: int | None) -> None:
        peer.setblocking(False)
        self._peers[peer] = rank, b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            text = peer.recv(4096)
        except OSError:  # reset by the kernel of a peer that was killed
            text = b""
        rank, before = self._peers[peer]
        *lines, rest = (before + text).split(b"\n")
        self._peers[peer] = rank, rest
        for line in lines:
            self._take(peer, line)
        if not text and peer in self._peers:
            self._drop(peer, is_lost=True)

    def _take(self, peer: socket.socket, line: bytes) -> None:
        """Handle a line: a rank that introduces itself, one that leaves, or, from rank 0, one that was lost."""
        rank, rest = self._peers[peer]
        secret, _, number = line.decode(errors="replace").partition(" ")
        if line == _LEFT:
            self._drop(peer, is_lost=False)
        elif self.rank:
            self.lost.append(int(line))
        elif rank is None and secret == self._secret and number.isdigit():
            self._peers[peer] = int(number), rest

    def _drop(self, peer: socket.socket, is_lost: bool) -> None:
        rank, _ = self._peers.pop(peer)
        self._selector.unregister(peer)
        peer.close()
        if is_lost and rank is not None:
            self.lost.append(rank)
            if self.rank == 0:
                self._send(str(rank).encode())

    def _send(self, line: bytes) -> None:
        for peer in tuple(self._peers):
            with suppress(OSError):
                peer.send(line + b"\n")
